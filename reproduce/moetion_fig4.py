"""MOETION Fig. 4: bytes of a checkpoint of everything (CheckFreq, Gemini) and of selected experts, three models."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from . import moetion_fig9
from .figure import Figure, bars, published


@dataclass(frozen=True)
class ModelSizes:
    """One model. expert_parameters: of one expert in all layers. selected: experts of a layer that are saved, at least
    and at most; equal where the paper says how many."""

    name: str
    experts: int
    parameters: float
    expert_parameters: float
    selected: tuple[float, float]

    @property
    def other_parameters(self) -> float:
        """All but experts."""
        return self.parameters - self.experts * self.expert_parameters

    @property
    def full_bytes(self) -> float:
        """What CheckFreq and Gemini save."""
        return self.parameters * bytes_per_parameter()

    @property
    def selected_bytes(self) -> tuple[float, float]:
        """What MOETION saves, at least and at most."""
        low, high = (self.other_parameters + count * self.expert_parameters for count in self.selected)
        return low * bytes_per_parameter(), high * bytes_per_parameter()


def bytes_per_parameter() -> int:
    """Of weights and optimizer together (2.3)."""
    each = published("moetion")["bytes_per_parameter"]
    return int(each["weights"]) + int(each["optimizer"])


@cache
def models() -> tuple[ModelSizes, ...]:
    """All three. A model with E experts has (E - 1) of them more than the dense one it is made of, which gives the size
    of one; for MoE-GPT-3.8B-8E that would leave less than nothing for the rest, so its layers are those of Fig. 9."""
    given = published("moetion")
    low, high = given["budget"]["experts_share"]
    found = []
    for name, model in given["models"].items():
        if name == "where":
            continue
        experts, parameters = model["experts"], model["parameters"]
        each = (parameters - model["dense_parameters"]) / (experts - 1)
        if experts * each > parameters:
            shape = moetion_fig9.shape(experts)
            parameters, each = float(shape.total_parameters), shape.expert_parameters / experts
        counted = given["fig4"]["selected_experts"] if experts == given["fig4"]["experts"] else None
        selected = (low * experts, high * experts) if counted is None else (float(counted), float(counted))
        found.append(ModelSizes(name, experts, parameters, each, selected))
    return tuple(found)


def figure() -> Figure:
    """The figure as a table, and what the text says of one model beside it."""
    given = published("moetion")["fig4"]
    (largest,) = [model for model in models() if model.experts == given["experts"]]
    compared = [
        ("everything", largest.full_bytes, given["full_bytes"]),
        ("the experts with 80 % of the tokens", largest.selected_bytes[1], given["selected_bytes"]),
    ]
    names = [one.name.removeprefix("MoE-GPT-") for one in models()]
    series = {
        "CheckFreq, Gemini": [one.full_bytes / 1e9 for one in models()],
        "MOETION": [one.selected_bytes[1] / 1e9 for one in models()],
    }
    return Figure(
        "moetion_fig4",
        {
            "models": [
                {"name": one.name, "full_bytes": one.full_bytes, "selected_bytes": one.selected_bytes}
                for one in models()
            ],
            "compared": [{"what": what, "ours": ours, "published": there} for what, ours, there in compared],
        },
        (
            ((one.name, one.full_bytes, *one.selected_bytes, f"{one.full_bytes / one.selected_bytes[1]:.1f}")
                 for one in models()),
            ((what, ours, there, ours / there - 1) for what, ours, there in compared),
        ),
        lambda axes: bars(axes[0], names, series, ylabel="GB"),
    )  # fmt: skip
