"""The demo: real text, token vectors of a real model, and questions that the library answers with MaxSim."""

from .answers import Answer, Hit, Match, Report, run
from .corpus import DemoCorpus, load
from .embedder import MissingDemoExtra, embed
from .render import render

__all__ = ["Answer", "DemoCorpus", "Hit", "Match", "MissingDemoExtra", "Report", "embed", "load", "render", "run"]
