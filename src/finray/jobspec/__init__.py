"""A run as a job of Kubernetes, Docker Compose, Slurm, Ray's cluster launcher, or a platform with `replicas`."""
