"""Workers: what runs inside the processes of a training run. The workflows (rill.workflows) launch and call them.

rollout, env_worker       engines; environments in processes of their own
episodes                  a task from prompt to outcome, in either of them
scorers                   models that add something to samples on their way
learners, actor           what learns from them: the critic, the policy
records, edges            what passes between them, and the way of a batch to one group, chunk by chunk
config                    the tables of a recipe that they read
robots/                   what an embodied run has of its own: simulators, the policy that acts, its trainer
"""
