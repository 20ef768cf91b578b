"""The losses of steps of AdamW, for the scripts that make fixtures."""
import json

import torch

STEPS, RATE = 12, 0.01


def train(model, loss_of):
    """Losses before each of twelve steps of AdamW on one batch, and the loss after them."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return json.dumps({"optimizer": "AdamW", "lr": RATE, "losses": losses, "evaluation": loss_of(model).item()}, indent=1) + "\n"
