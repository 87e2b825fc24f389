"""Files with a case and its outcome in each line, in JSON; `pytest --update-golden` writes the outcomes anew."""

import json


def check_cases(path, outcome, config):
    """Compare the outcome of each case of a file with the stored one; a new case has any."""
    stored = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = [[case, outcome(case)] for case, _ in stored]
    if config.getoption("--update-golden"):
        path.write_text("".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in found), encoding="utf-8")
    else:
        assert [pair for pair in found if pair not in stored] == [], "for a meant change: pytest --update-golden"
