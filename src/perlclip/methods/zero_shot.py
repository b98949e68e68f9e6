"""Zero-shot CLIP: nothing is trained. The line every method starts from (Radford et al., ICML 2021).

One prompt a class, the data set's own, or with `ensemble=true` the mean over the seven ImageNet templates that CoOp's
code selects plus the data set's own: each template's embeddings are brought to unit length, averaged, and again.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from perlclip.methods.base import ClassState, Method
from perlclip.methods.parts import FrozenTextState
from perlclip.methods.registry import register
from perlclip.methods.settings import Config
from perlclip.text.classes import Classes
from perlclip.text.templates import IMAGENET_7, check_template


@dataclass(frozen=True, kw_only=True)
class ZeroShotConfig(Config):
    """Which sentences stand for a class."""

    ensemble: bool = False  # average over several templates
    templates: tuple[str, ...] = IMAGENET_7
    own: bool = True  # and the data set's own; CoOp's code leaves that out on ImageNet

    def __post_init__(self) -> None:
        super().__post_init__()
        for template in self.templates:
            check_template(template)


@register("zero-shot", summary="nothing; one prompt a class, or an ensemble", where="–", venue="ICML 2021")
class ZeroShot(Method):
    """Image and class embeddings of the frozen towers."""

    config_class = ZeroShotConfig
    config: ZeroShotConfig

    @classmethod
    def trains(cls, config: Config) -> bool:
        """Never."""
        return False

    def prepare(self, classes: Classes) -> FrozenTextState:
        """Encode the prompts, once and for all."""
        # A template that is in both lists counts once.
        own = {classes.template} if self.config.own or not self.config.ensemble else set()
        templates = {*self.config.templates, *own} if self.config.ensemble else own
        t_CE = sum(self.backbone.encode_text(classes.prompts(template)) for template in sorted(templates))
        assert isinstance(t_CE, Tensor)
        return FrozenTextState(classes=classes, t_CE=F.normalize(t_CE, dim=-1))

    def encode_text(self, state: ClassState) -> Tensor:
        """The embeddings made by `prepare`."""
        assert isinstance(state, FrozenTextState)
        return state.t_CE
