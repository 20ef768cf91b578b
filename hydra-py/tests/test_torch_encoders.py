"""Encoders with relative positions, and encoders without a head."""

from __future__ import annotations

from typing import Any

import pytest

import hydra_train as hydra

torch = pytest.importorskip("torch", reason="PyTorch is not installed here")
transformers = pytest.importorskip("transformers", reason="Transformers is not installed here")

from hydra_train.torch import chain  # noqa: E402
from test_torch import PLAIN, plain_losses, tokens, trained  # noqa: E402

T5: dict[str, Any] = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 3, "num_heads": 4, "num_labels": 2}
BERT: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
ADAMW: dict[str, Any] = PLAIN | {"optimizer": "adamw", "weight_decay": 0.01, "lr": 1e-3, "steps": 4}
DROPOUT = {"BertModel": ("hidden_dropout_prob", "attention_probs_dropout_prob")}


def model_of(kind: str, dropout: float = 0.0) -> Any:
    family = kind.removesuffix("EncoderModel").removesuffix("ForTokenClassification").removesuffix("Model")
    settings = dict.fromkeys(DROPOUT.get(kind, ("dropout_rate", "classifier_dropout")), dropout)
    torch.manual_seed(7)
    return getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**(BERT if kind == "BertModel" else T5), **settings))


def data_of(kind: str) -> list[dict[str, Any]]:
    labels = {"TokenClassification": lambda row: torch.where(row["labels"] < 0, -100, row["labels"] % 2)}
    of = next((each for name, each in labels.items() if kind.endswith(name)), lambda row: row["labels"][:1] % 2)
    return [row | {"labels": of(row)} for row in tokens()]


def contrast(outputs: Any, batch: Any) -> Any:
    """A loss of the hidden states alone, by the classes of the items."""
    weights = batch["attention_mask"].unsqueeze(-1).float()
    mean = torch.nn.functional.normalize((outputs.last_hidden_state * weights).sum(1) / weights.sum(1), dim=-1)
    classes = batch["labels"].reshape(-1)
    return ((mean @ mean.T) - (classes[:, None] == classes[None]).float()).square().mean()


def losses_in_pytorch(kind: str) -> list[float]:
    model = model_of(kind).train()

    def loss_of(batch: Any) -> Any:
        if kind.endswith("Classification"):
            return model(**batch).loss
        return contrast(model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]), batch)

    # The weight decay is 0.01 by default.
    return plain_losses(model.parameters(), loss_of, data_of(kind), 4, 1e-3, torch.optim.AdamW)


@pytest.mark.parametrize("kind", ["T5ForTokenClassification", "UMT5ForTokenClassification", "T5EncoderModel", "UMT5EncoderModel", "BertModel"])
@pytest.mark.filterwarnings("ignore:the loss of a batch does not depend on `head.model.pooler")
def test_encoders_train_as_in_pytorch_and_to_the_same_bits_when_cut(kind: str) -> None:
    settings: dict[str, Any] = {} if kind.endswith("Classification") else {"loss": contrast}
    whole, cut = (
        trained(chain(model_of(kind), **settings), data_of(kind), **(ADAMW | more)) for more in ({}, {"cuts": [1, 2, 4], "devices": "cpu:2x1"})
    )
    assert (whole.losses, whole.weights_sha256) == (cut.losses, cut.weights_sha256)
    assert whole.losses == pytest.approx(losses_in_pytorch(kind), rel=1e-5)
    loaded, before = whole.load(), model_of(kind)
    assert type(loaded) is type(before)
    changed = [name for name, each in loaded.named_parameters() if not torch.equal(each, before.get_parameter(name))]
    if kind.startswith("T5"):
        assert any(name.endswith("relative_attention_bias.weight") for name in changed)


def test_the_dropout_of_an_encoder_is_drawn_once_for_each_place() -> None:
    # A part that drew more or less than the model does would be refused.
    made = chain(model_of("T5ForTokenClassification", dropout=0.2))
    assert list(made.modules) == ["embed", "block0", "block1", "block2", "head"]
    data = data_of("T5ForTokenClassification")
    whole, cut = (trained(made, data, **(ADAMW | more)) for more in ({}, {"cuts": [1, 3], "devices": "cpu:2x1"}))
    assert (whole.losses, whole.weights_sha256) == (cut.losses, cut.weights_sha256)


def test_a_model_without_a_head_has_no_labels() -> None:
    with pytest.raises(hydra.UsageError, match="has no labels, because the model has no head, found input_ids, labels"):
        chain(model_of("T5EncoderModel"), loss=contrast, inputs=["input_ids", "labels"])
