"""Mixtures of experts whose loss has a part that is computed from the logits of all routers."""

from __future__ import annotations

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed here")
transformers = pytest.importorskip("transformers", reason="Transformers is not installed here")

from hydra_train.torch import _head, chain  # noqa: E402
from test_torch import PLAIN, plain_losses, tokens, trained  # noqa: E402

SMALL: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "eos_token_id": 2, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}
ADAMW: dict[str, Any] = PLAIN | {"optimizer": "adamw", "weight_decay": 0.01, "lr": 1e-3, "steps": 4}


def model_of(name: str, **settings: Any) -> Any:
    torch.manual_seed(7)
    config = SMALL | MODELS[name] | {"output_router_logits": True, "router_aux_loss_coef": 0.5} | settings
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**config))


@pytest.mark.parametrize("name", list(MODELS))
def test_the_loss_of_routers_is_that_of_the_model_and_does_not_depend_on_cuts(name: str) -> None:
    data = tokens()
    made = chain(model_of(name))
    assert isinstance(made.modules["head"].model.lm_head, _head.ChunkedHead)
    # Weight decay, unlike AdamW of PyTorch, would change the experts that no token of a batch was sent to.
    settings = ADAMW | {"weight_decay": 0}
    whole, cut = (trained(made, data, **(settings | more)) for more in ({}, {"cuts": [1, 2, 4], "devices": "cpu:2x1"}))
    assert (whole.losses, whole.weights_sha256) == (cut.losses, cut.weights_sha256)
    plain = model_of(name).train()
    adamw = functools.partial(torch.optim.AdamW, weight_decay=0)
    losses = plain_losses(plain.parameters(), lambda batch: plain(**batch).loss, data, 4, 1e-3, adamw)
    assert whole.losses == pytest.approx(losses, rel=1e-5)
    # The gradients of the blocks have those of the routers' loss.
    without = trained(chain(model_of(name, output_router_logits=False)), data, **settings)
    assert without.losses[0] < whole.losses[0]
    weights = [each.load().model.layers[0].mlp.gate.weight for each in (whole, without)]
    assert not torch.equal(*weights)


def test_the_given_model_has_no_hooks_after_it_is_cut() -> None:
    model = model_of("Mixtral")
    made = chain(model)
    batch = torch.utils.data.default_collate(tokens()[:2])
    expected = model.eval()(**batch).loss
    found: Any = [batch[key] for key in made.inputs]
    hooks = [len(each._forward_hooks) for each in model.modules()]
    for part in made.modules.values():
        found = part.eval()(*found)
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    # Those of Transformers stay, which record the logits for the model itself.
    assert hooks == [len(each._forward_hooks) for each in model.modules()]
