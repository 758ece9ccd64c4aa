"""Where compressed rollouts push the policy: gradients of naive training, corrections and replay."""
