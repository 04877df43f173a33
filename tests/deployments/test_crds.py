"""The manifests fit the schemas of KubeRay and of the Prometheus operator, field by field.

The schemas belong to those projects and are not kept here. `.ci/crds` downloads them; with PACELINE_CRDS set to its
folder the tests run.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

MANIFESTS = Path(__file__).parents[2] / "deployments" / "kubernetes"
CRDS = Path(os.environ.get("PACELINE_CRDS", "/nonexistent"))
needs_crds = pytest.mark.skipif(not CRDS.is_dir(), reason="PACELINE_CRDS is not set (.ci/crds FOLDER makes the folder)")


def strict(schema: Any) -> Any:
    """A copy in which an object takes only the fields that it declares. The API server drops others without a word."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        closed.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        closed["additionalProperties"] = True
    return closed


def validator_of(definition: dict[str, Any], version: str) -> Any:
    """Validates manifests of one version of a custom resource."""
    (found,) = [each for each in definition["spec"]["versions"] if each["name"] == version]
    schema = strict(found["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"]["additionalProperties"] = True  # the API server's own
    return jsonschema.Draft7Validator(schema)


def errors(validator: Any, manifest: dict[str, Any]) -> list[str]:
    """One line per field that is wrong."""
    return [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(manifest)]


@pytest.fixture(scope="module")
def validators() -> dict[str, Any]:
    """A validator by kind."""
    definitions = [yaml.safe_load(path.read_text()) for path in sorted(CRDS.glob("*.yaml"))]
    return {each["spec"]["names"]["kind"]: validator_of(each, "v1") for each in definitions}


@needs_crds
@pytest.mark.parametrize("name", ["rayservice.yaml", "podmonitor.yaml"])
def test_a_manifest_fits_its_schema(name: str, validators: dict[str, Any]) -> None:
    manifest = yaml.safe_load((MANIFESTS / name).read_text())
    assert errors(validators[manifest["kind"]], manifest) == []


@needs_crds
def test_a_field_that_the_operator_does_not_know_is_noticed(validators: dict[str, Any]) -> None:
    manifest = yaml.safe_load((MANIFESTS / "rayservice.yaml").read_text())
    wrong = copy.deepcopy(manifest)
    worker = wrong["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    worker["maxReplica"] = 8
    worker["template"]["spec"]["containers"][0]["port"] = []
    found = errors(validators["RayService"], wrong)
    assert len(found) == 2
    assert "maxReplica" in found[0] + found[1]
    assert "'port' was unexpected" in found[0] + found[1]


DEFINITION: dict[str, Any] = {
    "spec": {
        "versions": [
            {
                "name": "v1",
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "metadata": {"type": "object"},
                            "spec": {
                                "type": "object",
                                "properties": {
                                    "size": {"type": "integer"},
                                    "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                                    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                                },
                            },
                        },
                    }
                },
            }
        ]
    }
}


def test_the_check_itself_is_strict_where_the_api_server_would_be_silent() -> None:
    validator = validator_of(DEFINITION, "v1")
    right = {"metadata": {"name": "x"}, "spec": {"size": 1, "free": {"any": 1}, "labels": {"a": "b"}}}
    assert errors(validator, right) == []
    assert errors(validator, right | {"spec": {"sise": 1}})
    assert errors(validator, right | {"spec": {"size": "1"}})
    assert errors(validator, right | {"spec": {"labels": {"a": 1}}})
