"""The decoder against transformers, and its layouts against each other."""

import pytest
import torch

from samebit.layers.rope import rope_table
from samebit.layout import PackedLayout, Segment
from samebit.models.decoder import Decoder
from samebit.models.load import load_model, named_masters
from samebit.quant.plan import load_recipe
from samebit.reference.sampling import Transform
from tests.tiny import tiny_folder

FAMILIES = ("llama", "qwen2", "qwen3")


def packed(*lengths: int) -> PackedLayout:
    segments, start = [], 0
    for n in lengths:
        segments.append(Segment(start, n))
        start += n
    return PackedLayout(tuple(segments))


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp(request.param), request.param, std=0.05)


def load(folder, recipe: str = "bf16") -> Decoder:
    return load_model(folder, load_recipe(recipe))


def test_log_probs_equal_transformers_to_bf16_rounding(folder):
    from transformers import AutoModelForCausalLM

    model = load(folder)
    ids = torch.randint(0, 250, (50,), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(ids[None]).logits[0, :-1, : model.config.tokenizer_size]
        want = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        hidden = model(ids, packed(50), "train")
        got, entropy = model.log_prob(hidden[:-1], ids[1:], Transform())
    # BF16 keeps 8 bits and errors grow over two layers of random weights
    assert float((got - want).abs().mean()) < 0.06
    p = logits.softmax(-1)
    assert float((entropy - (-(p * p.log()).sum(-1))).abs().mean()) < 0.06


def test_a_segment_does_not_see_its_neighbours_in_the_pack(folder):
    model = load(folder, "fp8")
    a, b = torch.randint(0, 250, (37,)), torch.randint(0, 250, (70,))
    with torch.no_grad():
        alone = model(a, packed(37), "train")
        after = model(torch.cat([b, a]), packed(70, 37), "train")[70:]
        before = model(torch.cat([a, b]), packed(37, 70), "train")[:37]
    assert torch.equal(alone, after) and torch.equal(alone, before)


def test_a_shared_prompt_gives_each_sample_the_bits_of_standing_alone(folder):
    model = load(folder, "fp8")
    prompt, x, y = (torch.randint(0, 250, (n,)) for n in (67, 5, 9))
    layout = PackedLayout((Segment(0, 67), Segment(67, 5, 0, 67), Segment(72, 9, 0, 67)))
    with torch.no_grad():
        shared = model(torch.cat([prompt, x, y]), layout, "train")
        first = model(torch.cat([prompt, x]), packed(72), "train")
        second = model(torch.cat([prompt, y]), packed(76), "train")
    assert torch.equal(shared[:72], first)
    assert torch.equal(shared[72:], second[67:])


def test_gradients_equal_an_autograd_of_plain_torch(folder):
    """BF16 recipe against transformers' FP32 gradients: the same function to BF16 rounding."""
    from transformers import AutoModelForCausalLM

    model = load(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, 250, (60,), generator=torch.Generator().manual_seed(1))
    hidden = model(ids, packed(60), "train")
    model.log_prob(hidden[:-1], ids[1:], Transform())[0].mean().backward()
    logits = theirs(ids[None]).logits[0, :-1, : model.config.tokenizer_size]
    logits.log_softmax(-1).gather(1, ids[1:, None]).mean().backward()
    want = {n: p.grad for n, p in theirs.named_parameters()}
    got = {
        name: grad
        for name, grad in zip(named_masters(model), _gradients(model), strict=True)
        if name in want
    }
    assert got.keys() == want.keys()
    for name, grad in got.items():
        error = float((grad - want[name]).norm() / want[name].norm())
        assert error < 0.08, (name, error)


def _gradients(model: Decoder) -> list[torch.Tensor]:
    """Gradients in the order of named_masters, by swapping each master for its gradient."""
    saved = {p: p.data for p in model.parameters()}
    for p in saved:
        p.data = p.grad
    grads = [t.clone() for t in named_masters(model).values()]
    for p, data in saved.items():
        p.data = data
    return grads


def test_a_shared_prompt_s_gradient_is_the_sum_over_its_samples(folder):
    model = load(folder)
    prompt, x, y = (torch.randint(0, 250, (n,)) for n in (40, 6, 8))

    def gradient(ids: torch.Tensor, layout: PackedLayout, rows: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        hidden = model(ids, layout, "train")[rows]
        model.log_prob(hidden, torch.zeros(len(rows), dtype=torch.int64), Transform())[
            0
        ].sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    shared = gradient(
        torch.cat([prompt, x, y]),
        PackedLayout((Segment(0, 40), Segment(40, 6, 0, 40), Segment(46, 8, 0, 40))),
        torch.arange(40, 54),
    )
    apart = gradient(torch.cat([prompt, x]), packed(46), torch.arange(40, 46)) + gradient(
        torch.cat([prompt, y]), packed(48), torch.arange(40, 48)
    )
    assert float((shared - apart).norm() / apart.norm()) < 0.01


def test_a_tied_head_gets_one_summed_gradient_and_one_refresh(folder):
    model = load(folder)
    assert model.head is model.embedding
    ids = torch.tensor([5, 6, 7])
    hidden = model(ids, packed(3), "train")
    model.log_prob(hidden[:-1], ids[1:], Transform())[0].sum().backward()
    grad = model.embedding.grad
    assert float(grad[200].norm()) > 0  # through the head's softmax
    with torch.no_grad():
        model.embedding.add_(1.0)
    model.refresh()
    assert torch.equal(model.head_weight.codes, model.embedding.detach().bfloat16())


def test_ids_past_the_tokenizer_are_never_drawn_and_weigh_nothing(folder):
    model = load(folder)
    ids = torch.tensor([1, 2, 3])
    with torch.no_grad():
        hidden = model(ids, packed(3), "train")
        before, _ = model.log_prob(hidden, torch.tensor([4, 5, 6]), Transform())
        model.head[model.config.tokenizer_size :] = 50.0
        model.refresh()
        hidden = model(ids, packed(3), "train")
        after, _ = model.log_prob(hidden, torch.tensor([4, 5, 6]), Transform())
        drawn, _ = model.sample(hidden.repeat(200, 1), Transform(), [(0, i, 0) for i in range(600)])
    assert torch.equal(before, after)
    assert int(drawn.max()) < model.config.tokenizer_size


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.1386,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": True,
        },
    ],
)
def test_rotary_tables_equal_transformers(scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_theta": 10000.0, "rope_type": "default"} | (scaling or {})
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        rope_parameters=parameters,
    )
    theirs = LlamaRotaryEmbedding(config)
    cos, sin = theirs(torch.zeros(1, 1, 64), torch.arange(256)[None])
    ours = rope_table(64, 256, 10000.0, scaling)
    assert torch.allclose(ours[0], cos[0, :, :32], atol=3e-5)
    assert torch.allclose(ours[1], sin[0, :, :32], atol=3e-5)


def test_a_tensor_of_another_shape_names_file_and_tensor(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tiny_folder(tmp_path / "m", "llama")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"up_proj.*shape"):
        load(folder)
