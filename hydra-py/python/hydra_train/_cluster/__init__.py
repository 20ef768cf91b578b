"""A grid on several nodes. `placement` is pure, `storage` holds files that all nodes see, `folder` is on a
machine's own disk, `node` trains a part of the grid, `driver`
decides which, and `hydra_train.ray` runs them on a cluster of Ray. Of these, `trainable`
alone, which is Ray Tune's, imports Ray."""
