"""The gateway: any agent harness's base URL; every conversation becomes token-exact trajectories."""
