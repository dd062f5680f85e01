"""Pipeline parallelism: `AutoPipeline`, and the rooms it is made of."""
