"""How processes start: this process, torch's launcher, torchrun, srun."""
