"""What deploy/ holds agrees with itself and with the code; the readiness of a pod is a token that was generated."""

import http.server
import json
import subprocess
import sys
import threading

import pytest
import yaml
from places import MODEL, ROOT

DEPLOY = ROOT / "deploy"


def applications(text: str) -> list[dict]:
    return yaml.safe_load(text)["applications"]


def test_kubernetes_serves_the_application_of_ray():
    config = yaml.safe_load((DEPLOY / "ray" / "serve_smollm3.yaml").read_text())
    service = yaml.safe_load((DEPLOY / "kubernetes" / "rayservice.yaml").read_text())
    assert applications(service["spec"]["serveConfigV2"]) == config["applications"]
    (worker,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    limits = worker["template"]["spec"]["containers"][0]["resources"]["limits"]
    told = json.loads(json.loads(worker["rayStartParams"]["resources"]))
    assert told == {"neuron_cores": limits["aws.amazon.com/neuroncore"]}


def test_the_builder_is_there():
    (application,) = applications((DEPLOY / "ray" / "serve_smollm3.yaml").read_text())
    module, _, function = application["import_path"].partition(":")
    assert module.startswith("smollm3_neuron.")
    source = (MODEL / "src").joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()
    assert f"\ndef {function}(" in source
    assert application["args"].keys() == {"artifact", "autoscaling_config"}


@pytest.mark.parametrize(("tokens", "ready"), [(1, True), (0, False), (None, False)])
def test_a_pod_is_ready_when_it_has_generated_a_token(tokens, ready):
    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({"data": [{"id": "m"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/completions" and body["model"] == "m" and body["max_tokens"] == 1
            if tokens is None:
                self.send_error(500)
            else:
                self.answer({"usage": {"completion_tokens": tokens}})

        def answer(self, value):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def log_message(self, *args):
            pass

    resources = yaml.safe_load_all((DEPLOY / "kubernetes" / "server.yaml").read_text())
    (deployment,) = (resource for resource in resources if resource["kind"] == "Deployment")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    program, flag, code = container["readinessProbe"]["exec"]["command"]
    assert (program, flag) == ("python3", "-c") and container["resources"]["limits"]["aws.amazon.com/neuroncore"] == 2
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code = code.replace("127.0.0.1:8000", f"127.0.0.1:{server.server_port}")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
        server.shutdown()
    assert (done.returncode == 0) is ready
