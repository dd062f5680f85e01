"""Process start: the local launcher, torchrun, Slurm, Kubernetes and SkyPilot."""
