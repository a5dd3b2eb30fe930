"""What an embodied run has of its own: simulators, the policy that acts, what becomes of an episode, and the trainer.
The step is in rill.workflows.embodied; controller, loop and recovery are everybody's."""
