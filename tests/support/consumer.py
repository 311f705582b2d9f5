"""A consumer process that claims two groups at a time, exactly or at most, and acknowledges them, until there are none left.

Arguments: the log, the policy ("": none) and the proxies' URLs. If a proxy does not respond, it tries the next one. It uses
the standard library only.
"""

import json
import os
import random
import sys
import time
import urllib.error
import urllib.request

LEASE_S = 0.6


def main(log: str, policy: str, *urls: str) -> None:
    written = os.open(log, os.O_WRONLY | os.O_APPEND)
    name = f"consumer-{os.getpid()}"
    claim = {"consumer": name, "groups": 2, "lease_s": LEASE_S, **({"policy": policy} if policy else {})}
    while True:
        batch = post(urls, "/batches/claim", {**claim, "exact": True, "wait_s": 0.3})
        note(written, ["exact", len(batch["groups"])])
        if not batch["groups"]:
            batch = post(urls, "/batches/claim", {**claim, "wait_s": 3})
        if not batch["groups"]:
            return
        now = round(time.time() * 1000)
        for group in batch["groups"]:
            note(written, ["claimed", now, batch["batch_id"], f"{policy}{group['group_id']}", batch["lease_ms"]])
            note(written, ["rewards", group["group_id"], group["rewards"]])
        time.sleep(random.choice((0.01, 0.1, LEASE_S * 1.5)))
        response = post(urls, f"/batches/{batch['batch_id']}/ack", {})
        for group in response["acked"] if response else ():
            note(written, ["acked", batch["batch_id"], f"{policy}{group}"])


def post(urls, path, body):
    """Send a request; return the response, or None if the lease was lost."""
    for url in urls * 20:
        request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=50) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            if error.code == 409:
                return None
            time.sleep(0.05)
        except OSError:
            time.sleep(0.05)
    raise SystemExit("no proxy answers")


def note(written, line):
    os.write(written, json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
