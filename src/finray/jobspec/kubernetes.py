"""A run as a KubeRay RayJob: a cluster with token authentication that lasts as long as the run."""

from __future__ import annotations

from typing import Any

from finray.errors import ConfigError
from finray.jobspec.spec import MOUNT, RAY_VERSION, JobSpec, to_yaml

# Ray's agent answers this on every node. We use Python because the image may lack wget.
_ALIVE = (
    "import urllib.request as u; "
    "assert b'success' in u.urlopen('http://localhost:52365/api/local_raylet_healthz', timeout=4).read()"
)


def rayjob(spec: JobSpec) -> str:
    """Manifests of a ConfigMap with the config and its files, and of the RayJob.
    Raises ConfigError: Kueue would admit a fixed number of workers that then changes."""
    machines = spec.machines
    scales = spec.min_nodes < spec.max_nodes
    if machines.queue and scales:
        raise ConfigError(
            "Kueue admits a job with a fixed number of machines, but this one may change",
            where="--queue",
            repair="leave out --min-nodes, and set cluster.num_workers to one number",
        )
    labels = {"app.kubernetes.io/name": "finray", "app.kubernetes.io/instance": spec.name}
    queue = {"kueue.x-k8s.io/queue-name": machines.queue} if machines.queue else {}
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{spec.name}-config", "labels": labels},
        "data": {"config.yaml": spec.config_text, **spec.files},
    }
    cluster: dict[str, Any] = {
        "rayVersion": RAY_VERSION,
        # KubeRay creates the token, and a Secret with it for head, workers and submitter.
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            # Keep workers of the run off the head.
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"},
            "template": _pod(spec, "ray-head", cpus=4, memory=16, gpus=0),
        },
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": spec.min_nodes if scales else spec.nodes,
                "minReplicas": spec.min_nodes if scales else spec.nodes,
                "maxReplicas": spec.max_nodes,
                "rayStartParams": {},
                "template": _pod(
                    spec, "ray-worker", cpus=spec.cpus_per_node, memory=spec.memory_gb, gpus=spec.gpus_per_node
                ),
            }
        ],
    }
    if scales:
        cluster["enableInTreeAutoscaling"] = True
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": spec.name, "labels": labels | queue},
        "spec": {
            "entrypoint": f"finray train {MOUNT}/config.yaml",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            # A retry gets a new cluster, and continues from the newest checkpoint.
            "backoffLimit": 2,
            **({"activeDeadlineSeconds": round(machines.hours * 3600)} if machines.hours else {}),
            # Kueue unsuspends it.
            **({"suspend": True} if machines.queue else {}),
            "rayClusterSpec": cluster,
        },
    }
    return to_yaml(config, job)


def _pod(spec: JobSpec, name: str, *, cpus: int, memory: int, gpus: int) -> dict[str, Any]:
    machines = spec.machines
    amounts: dict[str, Any] = {"cpu": str(cpus), "memory": f"{memory}Gi"}
    if gpus:
        amounts["nvidia.com/gpu"] = str(gpus)
    secrets = [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": machines.secret, "key": variable, "optional": True}}}
        for variable in machines.secrets
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "config", "mountPath": MOUNT, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": f"{spec.name}-config"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{max(1, memory // 4)}Gi"}},
    ]
    if machines.claim is not None:
        mounts.append({"name": "shared", "mountPath": machines.shared})
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": machines.claim}})
    probe = {"exec": {"command": ["python", "-c", _ALIVE]}, "timeoutSeconds": 10, "periodSeconds": 10}
    container: dict[str, Any] = {
        "name": name,
        "image": machines.image,
        "env": [*({"name": name, "value": value} for name, value in spec.environment.items()), *secrets],
        "resources": {"requests": amounts, "limits": amounts},
        "volumeMounts": mounts,
        "readinessProbe": probe | {"initialDelaySeconds": 10, "failureThreshold": 12},
        "livenessProbe": probe | {"initialDelaySeconds": 60, "failureThreshold": 12},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        # Ray shuts down in order. The run is not told before: it continues from its last checkpoint on the other pods.
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", "ray stop --grace-period 60"]}}},
    }
    if name == "ray-head":
        ports = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
        container["ports"] = [{"name": name, "containerPort": port} for name, port in ports.items()]
    pod: dict[str, Any] = {
        "containers": [container],
        "volumes": volumes,
        "terminationGracePeriodSeconds": 120,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
    }
    if gpus and machines.gpu_type:
        pod["nodeSelector"] = {"nvidia.com/gpu.product": machines.gpu_type}
    return {"metadata": {"labels": {"app.kubernetes.io/instance": spec.name}}, "spec": pod}
