"""The names LMCache has (0.5.6): 108 configuration keys, 12 old names, and what lies around them.

Data only. `config_lmcache.py` reads the keys that kvkeep has; for the others it warns, with what
kvkeep does instead where that can be said shortly.
"""

from __future__ import annotations

from collections.abc import Mapping

READ_KEYS: Mapping[str, str] = {
    "chunk_size": "chunk_tokens",
    "local_cpu": "memory.enabled",
    "max_local_cpu_size": "memory.size, for the whole node (LMCache: for each rank)",
    "local_disk": "disk.paths",
    "max_local_disk_size": "disk.size, for the whole node (LMCache: for each rank)",
    "remote_url": "remote.url",
    "remote_serde": "remote.codec: naive is raw, cachegen is cachegen",
    "extra_config": "disk.odirect, from use_odirect: true is on, false is auto",
    "cache_policy": "memory.policy and disk.policy",
    "save_unfull_chunk": "save_unfull_chunk",
    "save_decode_cache": "save_decode_cache",
    "min_retrieve_tokens": "min_retrieve_tokens",
}
"""What each key that is read becomes."""

_OTHERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "keys are always SHA-256 and need no PYTHONHASHSEED",
        ("pre_caching_hash_algorithm",),
    ),
    ("all layers of a chunk move together", ("use_layerwise", "use_gpu_connector_v3")),
    ("loads never hold up other requests", ("enable_async_loading",)),
    ("set memory.size to what may be used", ("reserve_local_cpu_size",)),
    (
        "memory.size is taken at the start",
        (
            "enable_lazy_memory_allocator",
            "lazy_memory_initial_ratio",
            "lazy_memory_expand_trigger_ratio",
            "lazy_memory_step_ratio",
            "lazy_memory_safe_size",
        ),
    ),
    ("chunks are spread over all of disk.paths", ("local_disk_path_sharding",)),
    ("every tier that is set up is used", ("retrieve_locations", "store_location")),
    ("see fetch_timeout_s", ("blocking_timeout_secs",)),
    ("see remote.timeout_s", ("lookup_timeout_ms",)),
    (
        "the engine's scheduler looks up by itself, with no server between",
        (
            "lookup_server_worker_ids",
            "enable_scheduler_bypass_lookup",
            "external_lookup_client",
            "hit_miss_ratio",
        ),
    ),
    (
        "every held slot has one owner, so none is let go by a timer",
        ("pin_timeout_sec", "pin_check_interval_sec"),
    ),
    ("each kept chunk carries a checksum", ("audit_actual_remote_url",)),
    ("Python's garbage collector is left alone", ("py_enable_gc",)),
    (
        "only equal prefixes are reused",
        (
            "enable_blending",
            "blend_recompute_ratios",
            "blend_thresholds",
            "blend_check_layers",
            "blend_min_tokens",
            "blend_special_str",
        ),
    ),
    (
        "engines share through one remote.url",
        ("enable_p2p", "p2p_host", "p2p_init_ports", "p2p_lookup_ports"),
    ),
    (
        "there is no controller; engines share through one remote.url",
        (
            "enable_controller",
            "lmcache_instance_id",
            "controller_pull_url",
            "controller_reply_url",
            "lmcache_worker_ports",
            "lmcache_worker_ids",
            "lmcache_worker_heartbeat_delay_time",
            "lmcache_worker_heartbeat_time",
        ),
    ),
    (
        "prefill and decode are not split by kvkeep; vLLM's NixlConnector does that",
        (
            "enable_pd",
            "pd_role",
            "pd_buffer_size",
            "pd_buffer_device",
            "pd_peer_host",
            "pd_peer_init_port",
            "pd_peer_alloc_port",
            "pd_peer_query_port",
            "pd_proxy_host",
            "pd_proxy_port",
            "pd_allocation_timeout_sec",
            "pd_shutdown_timeout_sec",
            "pd_condition_poll_interval_sec",
            "pd_max_prefill_len",
            "pd_backend_mode",
            "pd_skip_proxy_notification",
            "pd_bidirectional",
            "transfer_channel",
        ),
    ),
    (
        "use disk.paths for a local disk",
        (
            "nixl_backends",
            "nixl_buffer_size",
            "nixl_buffer_device",
            "gds_path",
            "gds_path_sharding",
            "gds_buffer_size",
            "use_gds",
            "gds_backend",
        ),
    ),
    (
        "only KV is kept, no hidden states",
        (
            "enable_hidden_state_cache",
            "max_hidden_state_cpu_size",
            "hidden_state_layers",
            "hidden_states_retrieve_mode",
        ),
    ),
    ("no script is ever run", ("script_allowed_imports", "run_script_api_enabled")),
    (
        "",
        (
            "local_cpu_use_hugepages",
            "numa_mode",
            "mp_host",
            "mp_port",
            "maru_path",
            "maru_pool_size",
            "internal_api_server_host",
            "internal_api_server_enabled",
            "internal_api_server_port_start",
            "internal_api_server_include_index_list",
            "internal_api_server_socket_path_prefix",
            "priority_limit",
            "runtime_plugin_locations",
            "storage_plugins",
            "remote_storage_plugins",
            "enable_chunk_statistics",
            "chunk_statistics_auto_start_statistics",
            "chunk_statistics_auto_exit_timeout_hours",
            "chunk_statistics_auto_exit_target_unique_chunks",
            "chunk_statistics_strategy",
            "enable_kv_events",
            "remote_config_url",
            "app_id",
        ),
    ),
)

OTHER_KEYS: Mapping[str, str] = {key: answer for answer, keys in _OTHERS for key in keys}
"""The keys that kvkeep does not have, each with what it does instead, or nothing."""

OLD_NAMES: Mapping[str, str] = {
    "enable_xpyd": "enable_pd",
    "nixl_peer_host": "pd_peer_host",
    "nixl_peer_init_port": "pd_peer_init_port",
    "nixl_peer_alloc_port": "pd_peer_alloc_port",
    "nixl_proxy_host": "pd_proxy_host",
    "nixl_proxy_port": "pd_proxy_port",
    "nixl_buffer_size": "pd_buffer_size",
    "nixl_role": "pd_role",
    "controller_url": "controller_pull_url",
    "lmcache_worker_port": "lmcache_worker_ports",
    "plugin_locations": "runtime_plugin_locations",
    "external_backends": "storage_plugins",
}
"""LMCache's aliases. `nixl_buffer_size` is both an alias and a key of its own there."""

IGNORED_KEYS = ("use_experimental",)
"""Accepted, and without any meaning here."""

IGNORED_ENV = (
    "LMCACHE_CONFIG_FILE",
    "LMCACHE_LOG_LEVEL",
    "LMCACHE_TRACK_USAGE",
    "LMCACHE_DISABLE_BANNER",
)
"""Variables that set nothing in a cache: no word is said about them."""

OTHER_ENV: Mapping[str, str] = {
    "LMCACHE_FORCE_SKIP_SAVE": "use kv_role kv_consumer to read only",
    "LMCACHE_MQ_TIMEOUT": "",
    "LMCACHE_DEVICE_BACKEND": "",
    "LMCACHE_GPU_STAGING_BUFFER_BYTES": "",
}
"""Variables outside the keys that kvkeep does not have."""

OTHER_PREFIXES: Mapping[str, str] = {
    "ec_": "only KV is kept, no encoder output",
    "coordinator_": "engines share through one remote.url",
    "resp_": "",
    "aerospike_": "",
    "mp.": "there is no LMCache server here",
}
"""Families of names, by the start of the key."""

OTHER_EXTRA_KEYS: Mapping[str, str] = {
    "discard_partial_chunks": "see save_unfull_chunk",
    "skip_last_n_tokens": "",
    "use_native": "",
    "use_layerwise": OTHER_KEYS["use_layerwise"],
}
"""What vLLM's LMCache connector reads from its extra configuration without a prefix."""

OTHER_EXTRA_CONFIG: Mapping[str, str] = {
    "disk_io_threads": "set disk.io_threads",
    "storage_root_dir": "set disk.paths",
    "save_chunk_meta": "each kept chunk carries its header",
}
"""Keys inside LMCache's `extra_config` for which there is a short answer."""
