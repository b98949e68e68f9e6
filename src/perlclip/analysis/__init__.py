"""What a PERL adapter does while it thinks: metrics and drift by step, evidence maps, cases, a page."""

from perlclip.analysis.evidence import HOWS, evidence_maps
from perlclip.analysis.explain import explain
from perlclip.analysis.single import Analysis, analyze
from perlclip.analysis.stores import analyze_store
from perlclip.analysis.trajectories import METRICS, Curve, Trajectories, curves, measure

__all__ = [
    "HOWS", "METRICS", "Analysis", "Curve", "Trajectories", "analyze", "analyze_store", "curves", "evidence_maps",
    "explain", "measure",
]  # fmt: skip
