"""How processes start: the command line, the local supervisor, brokers, the live view.

cli.py  commands_run.py  commands_inspect.py  commands_roles.py     the `headrace` command; options.py, settings.py
demo.py (presets.py)   up.py (tasks.py, model_dir.py)               what to run: a Plan
  -> running.py        until its Goal, with screen.py (view.py)     what people see
     -> stack.py       broker, topics, tasks, roles in order        broker/: one launcher, two kinds
        -> supervisor.py (restarts.py)  processes.py                children that cannot outlive their parent
     -> follow.py -> history.py -> plot.py (voids.py)               what the log says of the run
doctor.py  init.py  topic_list.py  interrupts.py  run_dir.py
"""
