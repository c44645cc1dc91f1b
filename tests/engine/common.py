"""Small models and requests the engine tests share."""

from __future__ import annotations

import torch

from samebit.models.decoder import Decoder
from samebit.models.load import load_model
from samebit.quant.plan import load_recipe
from samebit.types import Group, Prompt
from tests.tiny import END_ID, tiny_folder

FAMILIES = ("llama", "qwen2", "qwen3")


def tiny_model(folder, family: str, recipe: str, **options) -> Decoder:
    """A tiny random model with outlier channels, two blocks of 128 wide and a bit."""
    return load_model(tiny_folder(folder, family, outliers=2, **options), load_recipe(recipe))


def prompts(lengths=(36, 48, 64, 33), shared: int = 32, seed: int = 0) -> list[Prompt]:
    """Random prompts with `shared` leading tokens in common; none holds an end id."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(0, END_ID - 2, (n,), generator=generator).tolist()  # noqa: E731
    head = draw(shared)
    return [Prompt(f"p{i}", tuple(head + draw(n - shared)), "") for i, n in enumerate(lengths)]


def drawn(groups: list[Group]) -> list[tuple]:
    """Everything of the samples that must be equal, log-probs as bytes."""
    return [
        (s.prompt_id, s.sample_id, s.ids, s.logps.tobytes(), s.versions.tobytes(), s.finish_reason)
        for group in groups
        for s in group.samples
    ]
