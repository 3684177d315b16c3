CREATE TABLE meta (
    -- What the file is about: the node that it belongs to, its clock, its age.
    key   TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

INSERT INTO meta (key, value) VALUES
    ('node_name', ''),          -- the Node that coild runs on; '' is not known yet
    ('node_uid', ''),           -- metadata.uid of that Node
    ('machine_id', ''),         -- /etc/machine-id
    ('cool_down_seconds', '0'), -- how long a freed address rests
    ('cooled_seq', '0'),        -- freed_seq up to which addresses were seen to have cooled down
    ('created_at', ''),         -- when the file was made
    ('rebuilt_at', ''),         -- when it was complete; '' while kernel and API are still read
    ('written_at', '');         -- when it was last proven to be writable

CREATE TABLE blocks (
    -- The AddressBlocks that this node holds.
    block_id INTEGER PRIMARY KEY,
    name     TEXT NOT NULL UNIQUE CHECK (name <> ''),
    pool     TEXT NOT NULL,
    ipv4     TEXT, -- CIDR
    ipv6     TEXT, -- CIDR
    since    TEXT NOT NULL CHECK (since GLOB '????-??-??T??:??:??.???Z'),
    -- Set when the history of the block was lost: all its addresses that have no
    -- row in addresses count as freed then.
    adopted_boot_id     TEXT,
    adopted_boottime_ms INTEGER,
    adopted_seq         INTEGER,
    CHECK (ipv4 IS NOT NULL OR ipv6 IS NOT NULL),
    CHECK ((adopted_seq IS NULL) = (adopted_boot_id IS NULL)),
    CHECK ((adopted_seq IS NULL) = (adopted_boottime_ms IS NULL))
) STRICT;

CREATE TABLE addresses (
    -- One row for each address that is or was in use. An address of a block
    -- without a row was never used. The UNIQUE columns are what makes it
    -- impossible to give an address twice.
    address_id    INTEGER PRIMARY KEY,
    ipv4          TEXT UNIQUE,
    ipv6          TEXT UNIQUE,
    -- pending: taken, the pod isn't wired yet. attached: the pod has it.
    -- releasing: given up, being removed. cooling: was given up; free again
    -- after the cool-down, and still tells who had it last.
    state         TEXT NOT NULL CHECK (state IN ('pending', 'attached', 'releasing', 'cooling')),
    since         TEXT NOT NULL CHECK (since GLOB '????-??-??T??:??:??.???Z'), -- UTC, of the state
    boot_id       TEXT NOT NULL CHECK (boot_id <> ''), -- in which the state was entered
    pool          TEXT NOT NULL,
    block         TEXT NOT NULL,
    -- NULL when the block of the address isn't in blocks.
    block_id      INTEGER REFERENCES blocks (block_id),
    block_offset  INTEGER CHECK (block_offset BETWEEN 0 AND 65535),
    container_id  TEXT NOT NULL CHECK (container_id <> ''),
    ifname        TEXT NOT NULL CHECK (ifname <> ''),
    pod_namespace TEXT NOT NULL,
    pod_name      TEXT NOT NULL,
    pod_uid       TEXT NOT NULL, -- '' when the runtime didn't tell
    netns_path    TEXT NOT NULL,
    netns_inode   INTEGER NOT NULL, -- 0 is unknown
    host_ifname   TEXT NOT NULL,
    host_ifindex  INTEGER NOT NULL,
    result        TEXT, -- the CNI result that ADD answered
    -- Order in which addresses were freed, and CLOCK_BOOTTIME then: wall clocks jump.
    freed_seq         INTEGER,
    freed_boottime_ms INTEGER,
    UNIQUE (block_id, block_offset),
    CHECK (ipv4 IS NOT NULL OR ipv6 IS NOT NULL),
    CHECK ((block_id IS NULL) = (block_offset IS NULL)),
    CHECK ((state = 'cooling') = (freed_seq IS NOT NULL)),
    CHECK ((state = 'cooling') = (freed_boottime_ms IS NOT NULL))
) STRICT;

-- An attachment has one address at most.
CREATE UNIQUE INDEX attachments ON addresses (container_id, ifname) WHERE state <> 'cooling';

-- The address of a block that was freed longest ago.
CREATE INDEX cooling ON addresses (block_id, freed_seq) WHERE state = 'cooling';

CREATE VIEW pods AS
    -- Which pod has which address, then who had the others last. coild itself
    -- measures the cool-down by CLOCK_BOOTTIME; here "free" is after the wall clock.
    SELECT pod_namespace AS namespace,
           pod_name AS name,
           ipv4,
           ipv6,
           CASE WHEN state = 'cooling' AND strftime('%s', 'now') - strftime('%s', since) >=
                     (SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'cool_down_seconds')
                THEN 'free' ELSE state END AS state,
           since,
           pool,
           block,
           container_id AS container,
           ifname AS interface,
           host_ifname AS host_interface
      FROM addresses
     ORDER BY addresses.state = 'cooling', namespace, name, since;
