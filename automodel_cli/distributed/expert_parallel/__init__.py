"""Expert parallelism: token dispatch, grouped GEMMs of experts, routers and router replay."""
