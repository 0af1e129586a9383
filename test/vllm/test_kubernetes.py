"""The manifests of deploy/kubernetes have the shape that Kubernetes' schemas ask for. They were never run."""

import copy

import pytest
import yaml
from places import ROOT

pytestmark = pytest.mark.ray
MANIFESTS = ROOT / "deploy" / "kubernetes"


def validate(resource: dict) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(copy.deepcopy(resource), kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("number", range(3))
def test_a_server(number):
    resource = list(yaml.safe_load_all((MANIFESTS / "server.yaml").read_text()))[number]
    validate(resource)
    resource["spec"]["of_no_schema"] = 1
    with pytest.raises(Exception, match="of_no_schema"):
        validate(resource)


def test_the_pods_of_a_ray_service():
    cluster = yaml.safe_load((MANIFESTS / "rayservice.yaml").read_text())["spec"]["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": group["template"]["spec"]}
        validate(pod)
