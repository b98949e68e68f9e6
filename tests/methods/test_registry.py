"""Methods by name: registering, plugins, and where variants think."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

import perlclip
from perlclip.methods import Config, Method, register, registry

PLUGIN = """
from perlclip.methods import Config, Recipe, register
from perlclip.methods.zero_shot import ZeroShot

@register("{name}", summary="nothing", where="-", venue="here")
class Mine(ZeroShot):
    '''Zero-shot CLIP by another name.'''
"""


@pytest.fixture
def clean(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.setattr(registry, "_PLUGINS", list(registry._PLUGINS))
    registry._known.cache_clear()
    yield
    registry._known.cache_clear()


def test_a_name_is_registered_once(clean):
    class Other(Method):
        config_class = Config

    with pytest.raises(perlclip.PerlclipError, match="there is a method 'coop' already, in perlclip"):
        register("coop", summary="", where="", venue="")(Other)
    assert perlclip.method_class("coop").__name__ == "CoOp"


def test_plugins_are_loaded_once_by_file_or_module(clean, tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN.format(name="mine"))
    monkeypatch.chdir(tmp_path)
    for name in (str(file), "mine.py", "./mine.py"):
        perlclip.load_plugin(name)
    (tmp_path / "my_module.py").write_text(PLUGIN.format(name="my-own"))
    monkeypatch.syspath_prepend(tmp_path)
    perlclip.load_plugin("my_module")
    assert perlclip.list_methods("m*")[-2:] == ["mine", "my-own"]
    assert registry.plugins()[-2:] == (str(file), "my_module")
    for name, words in ((tmp_path / "gone.py", "No such file"), ("no_such_module", "No module named")):
        with pytest.raises(perlclip.PerlclipError, match=f"cannot load plugin .*{words}"):
            perlclip.load_plugin(str(name))
    for bad in ("def", "no_such_name"):
        (tmp_path / "json.py").write_text(bad)
        with pytest.raises(perlclip.PerlclipError, match="cannot load plugin"):
            perlclip.load_plugin(str(tmp_path / "json.py"))
    (tmp_path / "json.py").write_text(PLUGIN.format(name="mixed-up"))
    perlclip.load_plugin(str(tmp_path / "json.py"))
    assert sys.modules["json"].__name__ == "json", "a plugin takes nobody's name"


def test_installed_packages_bring_methods(clean, tmp_path, monkeypatch):
    (tmp_path / "installed_methods.py").write_text(PLUGIN.format(name="installed"))
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("installed", "installed_methods", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == "perlclip.methods" else [])
    assert "installed" in perlclip.list_methods()
    broken = EntryPoint("broken", "no_such_module", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [broken])
    registry._known.cache_clear()
    with pytest.warns(RuntimeWarning, match="going on without the methods of 'no_such_module'"):
        assert "perl" in perlclip.list_methods()


def test_a_depth_that_is_given_counts(backbone):
    """`variant="deep", depth=7` used to give (3, 7, 11), and `early` with it 0."""
    depths = {}
    for variant in ("shared", "early", "deep", "layer"):
        usual, given = ({"variant": variant}, {"variant": variant, "depth": 7})
        depths[variant] = [
            perlclip.create_method("perl", backbone, **c).config.depths("vision") for c in (usual, given)
        ]
    assert depths == {
        "shared": [(7,), (7,)],
        "early": [(0,), (7,)],
        "deep": [(3, 7, 11), (7,)],
        "layer": [(7, 9, 11), (7,)],
    }


def test_a_method_takes_its_backbone_along(backbone):
    """`method.to(device)` used to leave it behind; others that share it keep theirs."""
    method = perlclip.create_method("perl", backbone)
    method.to("meta")
    assert method.backbone.device.type == "meta" and backbone.device.type == "cpu"
    assert method.backbone is not backbone and next(method.parameters()).device.type == "meta"
    other = perlclip.create_method("coop", backbone)
    assert other.to("cpu").backbone is backbone


def test_packages_are_there_after_a_plain_import():
    code = "import perlclip; perlclip.analysis.analyze; perlclip.reference.plain_form; perlclip.methods.register"
    subprocess.run([sys.executable, "-c", code], check=True)
