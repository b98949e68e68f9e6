"""The family `metaclip_2`: CLIP's shape and names; its tokenizer (XLM-R's), SOS and EOS are other ones."""

from perlclip.backbone.base import Family
from perlclip.backbone.clip import build_towers

METACLIP_2 = Family(name="metaclip_2", model="MetaClip2Model", towers=build_towers)
