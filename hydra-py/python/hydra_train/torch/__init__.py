"""Modules of PyTorch as the layers of a chain, which Hydra cuts, spills and trains like its own models.

    import hydra_train as hydra
    from hydra_train.torch import Chain

    chain = Chain([first, second, third], inputs="x", loss=lambda outputs, batch: cross_entropy(outputs, batch["y"]))
    run = hydra.select(model=chain, data={"train": dataset, "validation": other}, lr=[1e-3, 3e-4]).wait()
    module = run.best.load()

Everything that a module draws comes from the key of its pass, so that a recomputed forward is the same.
"""

from hydra_train.torch._chain import Chain, Chained
from hydra_train.torch._cut import chain

__all__ = ["Chain", "Chained", "chain"]
