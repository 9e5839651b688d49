"""As much of W&B's service as its own client asks for: a run's rows by their numbers, its summary and its config."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Standin:
    """A service on a free port, which can be stopped and started again with what it knows.

    Attributes:
        runs: by id: what was said of it, ``history`` (rows by number) and ``summary``.
        takes_rows: else whoever sends some gets a 503.
    """

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.takes_rows = True
        self.lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.say({})

            def do_PUT(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"] or 0))
                self.say({})

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"] or 0))
                if self.path.endswith("/file_stream") and not service.takes_rows:
                    self.say({}, 503)
                elif self.path.endswith("/graphql"):
                    asked = json.loads(content)
                    with service.lock:
                        self.say({"data": service.answer(asked["query"], asked.get("variables") or {})})
                elif self.path.endswith("/file_stream"):
                    with service.lock:
                        service.take(self.path.split("/")[-2], json.loads(content))
                    self.say({})
                else:
                    self.say({})

            def say(self, answer: Any, status: int = 200) -> None:
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments: object) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *arguments: object) -> None:
                """A client that was killed is no fault."""

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, query: str, asked: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "p", "name": asked.get("project"), "entity": {"id": "e", "name": "me"}}
        if "UpsertBucket" in query:
            run = self.runs.setdefault(asked["name"], {"history": {}, "summary": {}, "starts": 0})
            run["starts"] += asked.get("displayName") is not None
            run |= {key: asked[key] for key in ("displayName", "tags", "config") if asked.get(key) is not None}
            found = {"id": "b", "name": asked["name"], "displayName": run.get("displayName"), "project": project}
            found |= {"config": "{}", "historyLineCount": len(run["history"])}
            return {"upsertBucket": {"bucket": found, "inserted": run["starts"] == 1}}
        if "RunResumeStatus" in query:
            run = self.runs.get(asked["name"], {})
            rows = run.get("history", {})
            bucket = {
                **{"id": "b", "name": asked["name"], "displayName": run.get("displayName"), "logLineCount": 0},
                **{"historyLineCount": len(rows), "eventsLineCount": 0, "eventsTail": "[]", "notes": None},
                "historyTail": json.dumps([json.dumps(rows[at]) for at in sorted(rows)[-1:]]),
                "summaryMetrics": json.dumps(run.get("summary", {})),
                **{"config": run.get("config", "{}"), "tags": run.get("tags", []), "wandbConfig": '{"t": 1}'},
            }
            return {"model": {**project, "bucket": bucket if run else None}}
        if "CreateRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in asked["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        if "Viewer" in query or "viewer" in query:
            return {"viewer": {"id": "me", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        return {}

    def take(self, run_id: str, stream: dict[str, Any]) -> None:
        run = self.runs.setdefault(run_id, {"history": {}, "summary": {}, "starts": 0})
        for name, part in (stream.get("files") or {}).items():
            if name == "wandb-history.jsonl":
                for at, line in enumerate(part["content"], part["offset"]):
                    run["history"][at] = json.loads(line)
            elif name == "wandb-summary.json":
                run["summary"] = json.loads(part["content"][-1])
        if "exitcode" in stream:
            run["exitcode"] = stream["exitcode"]

    def steps(self, run_id: str, kind: str = "train") -> list[int]:
        """Steps of the records of a kind, in the order in which the service has them."""
        with self.lock:
            rows = self.runs.get(run_id, {}).get("history", {})
            return [rows[at][f"{kind}/step"] for at in sorted(rows) if f"{kind}/step" in rows[at]]
