"""The papers' question on a real instruct model: what training under compressed rollouts comes to."""
