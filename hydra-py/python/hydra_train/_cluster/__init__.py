"""Trains a grid on several nodes. `placement` has pure functions, `storage` holds the files that all nodes share, `folder` is on a node's
own disk, `node` trains a part of the grid, `driver` assigns tasks to nodes, and `hydra_train.ray` runs them on a Ray cluster. Only
`trainable`, which is for Ray Tune, imports Ray."""
