"""The heads of language models, whose logits exist for a chunk of positions at a time."""

from __future__ import annotations

from typing import Any

import pytest

import hydra_train as hydra

torch = pytest.importorskip("torch", reason="PyTorch is not installed here")

from hydra_train.torch import _head, chain  # noqa: E402
from hydra_train.torch._guard import Guard  # noqa: E402
from test_torch import plain_losses, tokens, trained, transformers_model  # noqa: E402

functional = torch.nn.functional


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 8 of the 48 positions of a batch, for a vocabulary of 256."""
    monkeypatch.setattr(_head, "CHUNK", 8 * 256 * 4)
    monkeypatch.setattr(_head, "PARTS", 1 << 20)


@pytest.mark.parametrize(
    ("positions", "vocabulary", "width", "has_bias", "chunk"),
    [(48, 256, 64, True, 1 << 24), (511, 3001, 64, True, 1 << 18), (7, 11, 3, True, 44), (130, 5000, 80, False, 1 << 20), (1, 5, 2, False, 1)],
)
def test_a_loss_by_chunks_is_that_of_all_logits(
    positions: int, vocabulary: int, width: int, has_bias: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_head, "CHUNK", chunk)
    torch.manual_seed(0)
    weight, hidden = torch.randn(vocabulary, width) / width**0.5, torch.randn(positions, width)
    rows = _head.rows_of(positions, weight)
    assert (rows == positions) == (chunk == 1 << 24 or positions == 1)
    labels = torch.randint(0, vocabulary, (positions,))
    if positions > 1:
        labels[::3] = -100
        # A chunk without any target, unless it is the only one.
        labels[:rows] = -100 if rows < positions else labels[:rows]
    for frozen in (set(), {"weight", "bias"}, {"hidden"}):
        bias = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)) if has_bias else None
        named = {"hidden": hidden, "weight": weight, "bias": bias}
        leaves = [each.requires_grad_(name not in frozen) for name, each in named.items() if each is not None]
        wanted = [each for each in leaves if each.requires_grad]
        expected = functional.cross_entropy(functional.linear(hidden, weight, bias), labels)
        found = _head.cross_entropy(hidden, weight, bias, labels)
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
        with torch.no_grad():
            assert torch.equal(_head.cross_entropy(hidden, weight, bias, labels), found)
        for scale in (1.0, 0.7):
            loss = _head.cross_entropy(hidden, weight, bias, labels) * scale
            pairs = zip(torch.autograd.grad(loss, wanted), torch.autograd.grad(expected * scale, wanted, retain_graph=True), strict=True)
            for ours, theirs in pairs:
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6 * theirs.abs().max().item())
                # One chunk has the bits of PyTorch.
                assert torch.equal(ours, theirs) or rows < positions or scale != 1.0
        # A frozen head has no gradient, not one that nothing uses.
        assert [each is not None for each in _gradients(hidden, weight, bias, labels)] == [
            each is not None and each.requires_grad for each in (hidden, weight, bias)
        ]


def _gradients(hidden: Any, weight: Any, bias: Any, labels: Any) -> list[Any]:
    gradients: list[Any] = _head.cross_entropy(hidden, weight, bias, labels).grad_fn.gradients
    return gradients


def test_without_targets_or_for_a_second_backward_a_loss_by_chunks_is_as_in_pytorch() -> None:
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4)
    loss = _head.cross_entropy(hidden, weight, None, torch.full((6,), -100))
    assert loss.isnan() and torch.autograd.grad(loss, hidden)[0].eq(0).all()
    loss = _head.cross_entropy(hidden, weight, None, torch.zeros(6, dtype=torch.long))
    torch.autograd.grad(loss, hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match="instead of a second backward"):
        torch.autograd.grad(loss, hidden)


@pytest.mark.parametrize("padding", [-1, 3])
def test_the_gradient_of_an_embedding_has_the_bits_of_pytorch_and_is_in_no_memory_of_it(padding: int) -> None:
    gradient, ids = torch.randn(4, 50, 64), torch.randint(0, 40, (4, 50))
    expected = torch.ops.aten.embedding_dense_backward(gradient, ids, 41, padding, False)
    with Guard("embed", None, {}, True) as guard:
        found = torch.ops.aten.embedding_dense_backward(gradient, ids, 41, padding, False)
    assert torch.equal(found, expected) and guard.peak == 0


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "frozen", "bias"])
@pytest.mark.usefixtures("small_chunks")
def test_a_model_with_a_head_by_chunks_trains_as_in_pytorch(kind: str) -> None:
    def model() -> Any:
        made = transformers_model(kind if kind in ("GPT2", "Llama") else "Phi" if kind == "bias" else "Llama")
        for module in made.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if kind == "frozen":
            made.lm_head.requires_grad_(False)
        return made

    data = tokens()
    assert isinstance(chain(model()).modules["head"].model.lm_head, _head.ChunkedHead)
    assert (model().lm_head.bias is not None) == (kind == "bias")
    settings: dict[str, Any] = {"lr": 0.01, "steps": 4, "weight_decay": 0}
    whole, cut = (trained(chain(model()), data, **settings, **more) for more in ({}, {"cuts": [1, 3], "devices": "cpu:2x1"}))
    assert (whole.losses, whole.weights_sha256) == (cut.losses, cut.weights_sha256)
    plain = model().train()
    losses = plain_losses(plain.parameters(), lambda batch: plain(**batch).loss, data, 4, 0.01)
    assert whole.losses == pytest.approx(losses, rel=1e-5)
    if kind == "frozen":
        assert torch.equal(whole.load().lm_head.weight, model().lm_head.weight)


def test_metrics_read_the_logits_of_an_evaluation_and_other_heads_are_as_they_were() -> None:
    def right(outputs: Any, batch: Any) -> Any:
        return (outputs.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]).sum()

    data = {"train": tokens(), "validation": tokens()[:6]}
    task = trained(chain(transformers_model("Llama"), metrics={"right": right}), data, lr=0.01, steps=2)
    batch = torch.utils.data.default_collate(data["validation"])
    with torch.no_grad():
        outputs = task.load().eval()(**batch)
    targets = int((batch["labels"][:, 1:] != -100).sum())
    assert task.report["validation"]["metrics"]["right"] == pytest.approx(right(outputs, batch).item() / targets)
    assert task.report["validation"]["loss"] == pytest.approx(outputs.loss.item(), rel=1e-5)
    # A model that changes its logits, and a loss that reads them.
    softened = chain(transformers_model("Gemma2")).modules["head"].model
    assert softened.config.final_logit_softcapping and type(softened.lm_head) is torch.nn.Linear
    own = chain(transformers_model("Llama"), loss=lambda outputs, batch: outputs.logits.float().logsumexp(-1).mean())
    assert type(own.modules["head"].model.lm_head) is torch.nn.Linear


def test_a_large_vocabulary_trains_in_less_memory_than_its_logits() -> None:
    transformers = pytest.importorskip("transformers", reason="Transformers is not installed here")
    config = transformers.GPT2Config(vocab_size=40_000, n_positions=128, n_embd=32, n_layer=1, n_head=2)
    torch.manual_seed(0)
    model = chain(transformers.GPT2LMHeadModel(config))
    ids = torch.arange(8 * 128).reshape(8, 128) * 39 % 40_000
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]
    logits = 4 * 128 * 40_000 * 4
    with pytest.raises(hydra.MemoryRefused) as caught:
        trained(model, data, device_memory="4MiB", strict=True, steps=2)
    # The weight, its gradient and the double buffer take 15 MiB, and three copies of the logits of a chunk 48 MiB.
    assert caught.value.needed_bytes < logits
    task = trained(model, data, device_memory="78MiB", steps=2)
    assert len(task.losses) == 2
