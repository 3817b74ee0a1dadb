"""The process of one `python_tests` call: confines itself, runs the code, then each test, and says how many passed.

Lines of JSON: in, the policy; out, what the sandbox lacks; in, {code, tests}; out, {passed} or {failed}.
"""

from __future__ import annotations

import json
import os
import sys

from ..sandbox.layers import Policy, apply


def main() -> None:
    """One call."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    policy = Policy(**json.loads(requests.readline()))
    os.chdir(policy.folder)
    _say(replies, {"missing": apply(policy)})
    task = json.loads(requests.readline())
    requests.close()
    _say(replies, _outcome(task["code"], task["tests"]))
    os._exit(0)


def _outcome(code: str, tests: list[str]) -> dict[str, object]:
    names: dict[str, object] = {"__name__": "__main__"}
    sys.path.insert(0, os.getcwd())
    try:
        exec(compile(code, "answer.py", "exec"), names)
    except BaseException:
        return {"failed": "code_raised"}
    return {"passed": sum(_passes(test, names) for test in tests)}


def _passes(test: str, names: dict[str, object]) -> bool:
    try:
        exec(compile(test, "test.py", "exec"), dict(names))
    except BaseException:
        return False
    return True


def _say(replies: int, answer: dict[str, object]) -> None:
    os.write(replies, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
