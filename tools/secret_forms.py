"""Makes src/finray/config/vendor/secret_forms.json from the rules of gitleaks.

    python tools/secret_forms.py GITLEAKS_TOML COMMIT

GITLEAKS_TOML is `config/gitleaks.toml` of github.com/gitleaks/gitleaks at that commit. Of its rules those are taken
that know a secret by its own form. Left out are those that know it by the name before it (`asana_token = 123...`):
finray/config/redact.py does that for all names.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "src" / "finray" / "config" / "vendor" / "secret_forms.json"
# Rules about whole files or commands; of what the id of a commit has too, or an ordinary name; and those that
# finray/config/redact.py has with fewer limits.
LEFT_OUT = frozenset(
    (
        *("curl-auth-header", "curl-auth-user", "kubernetes-secret-yaml", "sidekiq-sensitive-url", "jwt-base64"),
        *("sourcegraph-access-token", "gocardless-api-token", "sonar-api-token", "slack-webhook-url"),
        *("private-key", "jwt", "azure-ad-client-secret", "openai-api-key", "anthropic-api-key"),
        *("anthropic-admin-api-key", "aws-access-token", "gcp-api-key", "sentry-org-token", "huggingface-access-token"),
    )
)
# A rule's keywords, where they are those of the text around a token.
WORDS = {
    "airtable-personnal-access-token": ["pat"],
    "facebook-access-token": ["|", "%"],
    "cloudflare-origin-ca-key": ["v1.0-"],
    "harness-api-key": ["pat.", "sat."],
    "intra42-client-secret": ["s-s4t2"],
    "slack-config-access-token": ["xoxe"],
}
# In rules that look for a name.
_NAMED = "(?:=|>|:{1,3}="
# gitleaks wants white space or a quote behind a token. In a message it is followed by anything.
_ENDS = re.compile(r"(?:\(\?:\[[^\]]*\]\|(?:\\\\\[nr\]\|\$|\\Z|\$)(?:\|\\b)?\)|\\b)(\)?)$")
_LITERAL = re.compile(r"(?:\\b|\(\?:|\(\?i:|\((?!\?))*((?:[A-Za-z0-9_\-~=]|\\\.)*)")
_CLASS = r"(?:\[(?:[^\]\\]|\\.)+\]|\\w)"
# A prefix and one run of characters: as long as it is. Services change the length.
_RUN = re.compile(
    rf"(?P<head>.*?(?:[_\-~=]|\\\.)\)?)(?P<flags>\(\?i:)?(?P<run>{_CLASS})\{{(?P<least>\d+)(?:,\d*)?\}}"
    r"(?P<rest>[)=]*(?:\{0,\d\})?[)]*)"
)
LEAST = 16


def forms(rules: list[dict[str, Any]]) -> Iterator[tuple[str, list[str], str]]:
    """Of each rule that is taken: its id, words of which one is in every text that has the form, and the form.

    In a form ``\\b`` stands where a token begins.
    """
    for rule in rules:
        regex = rule.get("regex")
        if regex is None or rule["id"] in LEFT_OUT or "path" in rule:
            continue
        regex, words = to_python(regex), WORDS.get(rule["id"], rule["keywords"])
        if _NAMED in regex:
            regex = _value(regex)
            if regex is None:
                continue
            words = [_literal(regex).lower()]
        has_end = _ENDS.search(regex) is not None
        regex = relaxed(_ENDS.sub(r"\1", regex))
        if (has_end and not regex.rstrip(")").endswith("}")) or not re.search(r"[_\-.~]", _literal(regex)):
            regex += "(?![A-Za-z0-9])"
        yield rule["id"], words, regex


def _literal(regex: str) -> str:
    found = _LITERAL.match(regex)
    return found[1].replace("\\", "") if found else ""


def _value(regex: str) -> str | None:
    """The form of the value in a rule that looks for a name, if it has one of its own."""
    value = regex.rpartition("=]{0,5}")[2]
    value = _ENDS.sub("", value.removesuffix(")") if regex.startswith("(?i:") else value)
    literal = _literal(value)
    return f"\\b{value}" if len(literal) > 2 and re.search(r"[_\-.]|[A-Z]{4}", literal) else None


def to_python(regex: str) -> str:
    """A regular expression of Go's RE2 as one of Python's.

    Raises:
        ValueError: it cannot be said so.
    """
    regex = regex.replace("[[:alnum:]]", "[0-9A-Za-z]").replace(r"\z", r"\Z")
    made: list[str] = []
    # For each open group: how many groups its flags have opened, and whether one stands behind other characters.
    opened, place, in_class = [(0, False)], 0, False
    while place < len(regex):
        rest = regex[place:]
        flag = None if in_class else re.match(r"\(\?(i|-i|s)\)", rest)
        if flag is not None:
            count, is_inside = opened[-1]
            opened[-1] = (count + 1, is_inside or not re.search(r"^$|\((\?:)?$", "".join(made)))
            made.append(f"(?{flag[1]}:")
            place += len(flag[0])
            continue
        if rest[0] == "\\":
            made.append(rest[:2])
            place += 2
            continue
        if in_class or rest[0] == "[":
            in_class = rest[0] != "]"
        elif rest[0] == "(":
            opened.append((0, False))
        elif rest[0] == ")":
            made.append(")" * opened.pop()[0])
        elif rest[0] == "|" and opened[-1][1]:
            # In Go the flag holds for the branches that follow too.
            raise ValueError(f"a flag in the midst of branches: {regex}")
        made.append(rest[0])
        place += 1
    return "".join(made) + ")" * opened[0][0]


def relaxed(regex: str) -> str:
    """A prefix and a run of characters after it with no upper limit, and a lower one that leaves room."""
    found = _RUN.fullmatch(regex)
    if found is None or int(found["least"]) < LEAST or "{" in found["head"] or 0 < len(_literal(regex)) < 4:
        return regex
    run = found["run"]
    # Words with hyphens or underscores are names, unless there is a digit among them.
    must = f"(?={run}{{0,80}}?[0-9])" if re.search(r"\\w|_|-\]|\\-", run) else ""
    return f"{found['head']}{found['flags'] or ''}{must}{run}{{{LEAST},}}{found['rest']}"


def main(source: str, commit: str) -> None:
    """Write the file."""
    rules = tomllib.loads(Path(source).read_text(encoding="utf-8"))["rules"]
    made = [{"id": name, "words": words, "form": form} for name, words, form in forms(rules)]
    for one in made:
        re.compile(one["form"])
    about = "Made by tools/secret_forms.py from config/gitleaks.toml; licence: LICENSE-gitleaks"
    lines = ",\n".join(f"  {json.dumps(one)}" for one in made)
    text = f'{{"about": {json.dumps(about)}, "commit": {json.dumps(commit)}, "forms": [\n{lines}\n]}}\n'
    TARGET.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{len(made)} of {len(rules)} rules\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
