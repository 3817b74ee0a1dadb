"""vLLM as an engine: in our process, or a server process that is driven over its control endpoints.

engine.py      VllmEngine: the protocol over a transport
local.py       AsyncLLM on a thread of our own;  remote.py: a vLLM server over HTTP;  transport.py: what both do
handover.py    an update as a file that the workers map into memory

in vLLM's workers, loaded as `worker_extension_cls`:
worker.py      the extension and the weight-transfer engine `headrace`
cpu.py         keeps the CPU backend's weights unpacked, so that they can be written in place
describe.py    vLLM's layers -> fusing.py: which checkpoint names they hold -> places.py: where each element lies
live.py        checks updates, writes them in place, reads the weights back
"""
