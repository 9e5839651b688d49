"""Requests to the head process of a Ray cluster (the GCS), each with a deadline.

What Ray has in public asks its dashboard (``ray.util.state``), which a Ray of our own does not start, or its core
(``ray.nodes()``), which retries a head that does not answer for a minute and then ends this process. The messages, and
the function that adds the cluster's token, are private; they were checked in Ray 2.60.

Ray's core reads the environment when it is loaded: import this module only where it may be.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import (
    autoscaler_pb2,
    autoscaler_pb2_grpc,
    common_pb2,
    gcs_pb2,
    gcs_service_pb2,
    node_manager_pb2,
    node_manager_pb2_grpc,
)
from ray.core.generated import gcs_service_pb2_grpc as services

from finray.errors import ClusterError

ANSWER_S = 8.0
# States of an actor.
_STARTING, ALIVE = gcs_pb2.ActorTableData.PENDING_CREATION, gcs_pb2.ActorTableData.ALIVE


@contextmanager
def _channel(address: str) -> Iterator[Any]:
    # As Ray's core: tables of large clusters, and no proxy.
    channel = init_grpc_channel(address, [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)])
    try:
        yield channel
    finally:
        channel.close()


@contextmanager
def answering(*, where: str) -> Iterator[None]:
    """Within it, a head that does not answer is an error for the user. Raises ClusterError: it does not."""
    try:
        yield
    except grpc.RpcError as error:
        raise ClusterError(
            f"the head of the Ray cluster does not answer ({error.code().name.lower()})",
            where=where,
            repair="see whether it still runs (`finray cluster status`), and run the command again",
        ) from None


def check_alive(address: str, *, timeout: float = ANSWER_S) -> None:
    """Check that a head answers.

    Raises:
        grpc.RpcError: it does not, requires another token, or is not a Ray head.
        ray.exceptions.AuthenticationError: ``RAY_AUTH_MODE`` is ``token``, and there is none.
    """
    with _channel(address) as channel:
        services.NodeInfoGcsServiceStub(channel).CheckAlive(gcs_service_pb2.CheckAliveRequest(), timeout=timeout)


def nodes(address: str) -> list[dict[str, Any]]:
    """The nodes that a head knows: who, since when, whether alive and whether the head.

    Raises:
        grpc.RpcError: the head does not answer; so for all of these functions.
    """
    with _channel(address) as channel:
        request = gcs_service_pb2.GetAllNodeInfoRequest()
        reply = services.NodeInfoGcsServiceStub(channel).GetAllNodeInfo(request, timeout=ANSWER_S)
    return [
        {
            "id": node.node_id,
            "started": node.start_time_ms,
            "ip": node.node_manager_address,
            "name": node.node_manager_hostname,
            "labels": dict(node.labels),
            "alive": node.state == gcs_pb2.GcsNodeInfo.ALIVE,
            "is_head": node.is_head_node,
        }
        for node in reply.node_info_list
    ]


def drain(address: str, node: bytes, within_s: float, *, message: str) -> str:
    """Tell a head that a node will be gone; returns why it refuses, if it does."""
    request = autoscaler_pb2.DrainNodeRequest(
        node_id=node,
        reason=autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION,
        reason_message=message,
        deadline_timestamp_ms=int((time.time() + within_s) * 1000),
    )
    with _channel(address) as channel:
        reply = autoscaler_pb2_grpc.AutoscalerStateServiceStub(channel).DrainNode(request, timeout=ANSWER_S)
    return "" if reply.is_accepted else reply.rejection_reason_message or "it gives no reason"


def draining(address: str) -> dict[str, int]:
    """Ids of the nodes that are about to be drained, and when (milliseconds since 1970; 0 if that is not known)."""
    with _channel(address) as channel:
        request = gcs_service_pb2.GetDrainingNodesRequest()
        reply = services.NodeResourceInfoGcsServiceStub(channel).GetDrainingNodes(request, timeout=ANSWER_S)
    return {node.node_id.hex(): node.draining_deadline_timestamp_ms for node in reply.draining_nodes}


def available_resources(address: str) -> dict[str, dict[str, float]]:
    """Free resources by node id."""
    with _channel(address) as channel:
        request = gcs_service_pb2.GetAllAvailableResourcesRequest()
        reply = services.NodeResourceInfoGcsServiceStub(channel).GetAllAvailableResources(request, timeout=ANSWER_S)
    return {node.node_id.hex(): dict(node.resources_available) for node in reply.resources_list}


def actors(address: str, **filters: Any) -> list[Any]:
    """Ray's records of the actors that have a process or are about to, with these values of ``job_id``, ``actor_id`` or
    ``state``."""
    with _channel(address) as channel:
        request = gcs_service_pb2.GetAllActorInfoRequest(
            filters=gcs_service_pb2.GetAllActorInfoRequest.Filters(**filters)
        )
        reply = services.ActorInfoGcsServiceStub(channel).GetAllActorInfo(request, timeout=ANSWER_S)
    return [record for record in reply.actor_table_data if record.state in (_STARTING, ALIVE)]


def ended_jobs(address: str) -> set[str]:
    """Ids of the jobs that have ended; each driver is a job."""
    with _channel(address) as channel:
        request = gcs_service_pb2.GetAllJobInfoRequest(
            skip_submission_job_info_field=True, skip_is_running_tasks_field=True
        )
        reply = services.JobInfoGcsServiceStub(channel).GetAllJobInfo(request, timeout=ANSWER_S)
    return {job.job_id.hex() for job in reply.job_info_list if job.is_dead}


def prestart_workers(raylet: str, *, job: str, environment: str, count: int) -> None:
    """Have a node start processes for workers of a job, with a runtime environment as Ray's core writes it."""
    request = node_manager_pb2.PrestartWorkersRequest(
        language=common_pb2.Language.PYTHON,
        job_id=bytes.fromhex(job),
        num_workers=count,
        keep_alive_duration_secs=3600,
    )
    request.runtime_env_info.serialized_runtime_env = environment
    with _channel(raylet) as channel:
        node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=5)
