CREATE TABLE clients (
    -- The sandboxes that use Egresses and, if another plugin gives the addresses, all
    -- others that it was asked for.
    container_id  TEXT NOT NULL CHECK (container_id <> ''),
    ifname        TEXT NOT NULL CHECK (ifname <> ''),
    pod_namespace TEXT NOT NULL,
    pod_name      TEXT NOT NULL,
    pod_uid       TEXT NOT NULL, -- '' when the runtime didn't tell
    netns_path    TEXT NOT NULL,
    netns_inode   INTEGER NOT NULL, -- 0 is unknown
    ipv4          TEXT,
    ipv6          TEXT,
    since         TEXT NOT NULL CHECK (since GLOB '????-??-??T??:??:??.???Z'), -- UTC, of the record
    -- JSON: name, destinations, and ranges within them that aren't captured, of each Egress
    -- as it was when it was last there.
    egresses      TEXT NOT NULL CHECK (json_type(egresses) = 'array'),
    PRIMARY KEY (container_id, ifname),
    CHECK (ipv4 IS NOT NULL OR ipv6 IS NOT NULL)
) STRICT, WITHOUT ROWID;
