"""headrace: online reinforcement learning for LLM agents, built on a log.

schemas     what crosses a process boundary: records, codecs, topics, config, errors
streams     how it travels and what transforms it in flight
producers   what puts first: rollout workers, environments, engines
consumers   what takes last: the trainer
deploy      how processes start: command line, supervisor, brokers, live view

schemas <- streams <- {producers, consumers} <- deploy        (imports go only left)
"""
