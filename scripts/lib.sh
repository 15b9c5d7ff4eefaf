# shellcheck shell=bash
# What the scripts share. Source it after `set -euo pipefail`, at the top of the repository.

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }

# Runs a command as root: directly, or through sudo.
as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif have sudo; then
        sudo "$@"
    else
        die "not root and no sudo, so this is yours to run: $*"
    fi
}

# --- steps, with a summary -------------------------------------------------------------------

STEP_COUNT=0
STEP_TOTAL=0
STEP_FAILED=0
STEP_LINES=()
# What failed, in the tests' own words: where only the end of a long log is kept, it is still there.
STEP_REPORT=

# step NAME COMMAND…: runs it, goes on after a failure, and remembers both.
step() {
    local name=$1 began=$SECONDS outcome=ok log
    log=$(mktemp)
    shift
    STEP_COUNT=$((STEP_COUNT + 1))
    say "[$STEP_COUNT/$STEP_TOTAL] $name"
    # In a subshell with its own -e: inside `if`, bash would ignore failures half way.
    set +e
    {
        (
            set -e
            "$@"
        )
    } > >(tee "$log")
    local status=$? copied=$! waited
    # Whatever a failed step left running keeps the copy open: it is not waited for.
    for ((waited = 0; waited < 20; waited++)); do
        kill -0 "$copied" 2>/dev/null || break
        sleep 0.1
    done
    set -e
    if [ "$status" -ne 0 ]; then
        outcome="FAILED ($status)"
        STEP_FAILED=$((STEP_FAILED + 1))
        STEP_REPORT+=$(failed_tests "$log")$'\n'
    fi
    rm -f "$log"
    STEP_LINES+=("$(printf '%-50s %5ds  %s' "$name" $((SECONDS - began)) "$outcome")")
}

# failed_tests LOG: the tests that failed in it, and how; of each program no more than 6000 bytes.
failed_tests() {
    awk '/^failures:$/ { shown = 0; on = 1 } /^test result:/ { on = 0 }
        on && (shown += length($0) + 1) <= 6000' "$1"
}

# Prints what failed and all steps; fails if one of them did.
summary() {
    if [ -n "${STEP_REPORT//$'\n'/}" ]; then say "Failed tests" && printf '%s' "$STEP_REPORT" >&2; fi
    say "Summary"
    printf '    %s\n' "${STEP_LINES[@]}" >&2
    printf '    %-50s %5ds\n' total "$SECONDS" >&2
    [ "$STEP_FAILED" -eq 0 ]
}

# --- what has to be installed ----------------------------------------------------------------

APT_FRESH=
apt_install() {
    have apt-get || die "missing: $*; install it with the package manager of this system"
    say "Installing $*"
    if [ -z "$APT_FRESH" ]; then
        as_root apt-get update -qq >&2
        APT_FRESH=yes
    fi
    as_root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "$@" >&2
}

ensure_rust() {
    have cargo || die "Rust is missing: install it from https://rustup.rs"
    local tool
    for tool in fmt clippy; do
        cargo "$tool" --version >/dev/null 2>&1 || rustup component add rustfmt clippy ||
            die "cargo $tool is missing: rustup component add rustfmt clippy"
    done
    have cc || apt_install gcc libc6-dev
}

# Prints the directory of the newest server programs on this machine; fails if there are none.
find_postgres() {
    if [ -n "${SYNCGUARD_TEST_PG_BINDIR:-}" ]; then
        [ -x "$SYNCGUARD_TEST_PG_BINDIR/postgres" ] ||
            die "SYNCGUARD_TEST_PG_BINDIR: no PostgreSQL server in $SYNCGUARD_TEST_PG_BINDIR"
        printf '%s\n' "$SYNCGUARD_TEST_PG_BINDIR"
        return
    fi
    local dir dirs=() found
    IFS=: read -r -a dirs <<<"$PATH"
    if have pg_config; then dirs+=("$(pg_config --bindir)"); fi
    for dir in "${dirs[@]}" /usr/lib/postgresql/*/bin /usr/pgsql-*/bin /usr/libexec/postgresql* \
        /usr/lib/postgresql*/bin /usr/local/pgsql/bin /usr/local/lib/postgresql/*/bin \
        /opt/homebrew/opt/postgresql*/bin /usr/local/opt/postgresql*/bin \
        /home/linuxbrew/.linuxbrew/opt/postgresql*/bin /Applications/Postgres.app/Contents/Versions/*/bin; do
        if [ -x "$dir/postgres" ] && [ -x "$dir/initdb" ]; then
            printf '%s %s\n' "$("$dir/postgres" --version | sed 's/[^0-9]*\([0-9.]*\).*/\1/')" "$dir"
        fi
    done | sort -V | tail -n 1 | cut -d ' ' -f 2- | {
        read -r found && printf '%s\n' "$found"
    }
}

# Installs a server if there is none. No cluster of the system is made or started by it: the tests
# and the demo bring their own.
ensure_postgres() {
    if find_postgres >/dev/null; then return; fi
    have apt-get || die "no PostgreSQL server found: install one (Fedora: postgresql-server, macOS: brew install postgresql)"
    apt_install postgresql-common
    local conf=/etc/postgresql-common/createcluster.conf kept
    kept=$(mktemp)
    cat "$conf" >"$kept"
    echo 'create_main_cluster = false' | as_root tee -a "$conf" >/dev/null
    apt_install postgresql
    # As it was, for whoever wants a cluster of the system later.
    as_root tee "$conf" <"$kept" >/dev/null
    rm -f "$kept"
    find_postgres >/dev/null || die "PostgreSQL was installed and its server is not found"
}

# What single tests need: headers for TLS and libpq, a compiler for C++, Python, a real pooler, a terminal, a client that fetches other servers.
ensure_test_tools() {
    local missing=()
    have pkg-config || missing+=(pkg-config)
    have c++ || missing+=(g++)
    have python3 || missing+=(python3)
    pkg-config --exists libpq 2>/dev/null || have brew || missing+=(libpq-dev)
    [ -e /usr/include/openssl/ssl.h ] || have brew || missing+=(libssl-dev)
    have tmux || missing+=(tmux)
    have pgbouncer || [ -x /usr/sbin/pgbouncer ] || missing+=(pgbouncer)
    if [ ${#missing[@]} -gt 0 ] && have apt-get; then apt_install "${missing[@]}"; fi
    [ ${#VERSIONS[@]} -eq 0 ] || have npm || apt_install npm
}

# --- other versions of the server ------------------------------------------------------------

# Read by the scripts that source this file.
# shellcheck disable=SC2034
ALL_VERSIONS=(13 14 15 16 17 18)
# shellcheck disable=SC2034
OLDEST_AND_NEWEST=(13 18)

# test_on_version MAJOR TEST…: runs these integration tests on a server of that version. A version
# that cannot be had is a failure, and so is a name of no test: what was not run is not known to work.
test_on_version() {
    local major=$1 bindir name known tests=()
    local programs=(cargo test --locked --all-features --no-fail-fast --test it --test process --test tls)
    shift
    bindir=$(scripts/fetch-postgres "$major") ||
        die "PostgreSQL $major was NOT tested: it could not be fetched. To test the installed version alone: SYNCGUARD_ONE_VERSION=1"
    known=$("${programs[@]}" -- --list) || return
    for name in "$@"; do
        if ! grep -q "^$name::.*: test\$" <<<"$known"; then
            echo "error: no integration test is in a file $name" >&2
            return 1
        fi
        tests+=("$name::")
    done
    # A fifth of the random histories per version: they are played in full on the installed one.
    env -u SYNCGUARD_TEST_URL SYNCGUARD_TEST_PG_BINDIR="$bindir" \
        SYNCGUARD_SEQUENCES="${SYNCGUARD_SEQUENCES:-2000}" \
        "${programs[@]}" -- "${tests[@]}"
}

# --- a throwaway server ----------------------------------------------------------------------

SERVER_DIR=
SERVER_BIN=
SERVER_URL=

# PostgreSQL refuses to run as root, so root lends the work to an ordinary account.
as_server() {
    if [ "$(id -u)" -ne 0 ]; then
        "$@"
    elif have setpriv; then
        setpriv --reuid "$SERVER_USER" --regid "$(id -g "$SERVER_USER")" --clear-groups "$@"
    else
        runuser -u "$SERVER_USER" -- "$@"
    fi
}

# Sets SERVER_URL. Stopped and removed when the script ends, also by Ctrl-C.
start_server() {
    SERVER_BIN=$(find_postgres)
    SERVER_USER=${SYNCGUARD_TEST_PG_USER:-postgres}
    id -u "$SERVER_USER" >/dev/null 2>&1 || SERVER_USER=nobody
    trap stop_server EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    SERVER_DIR=$(mktemp -d /tmp/syncguard.XXXXXX)
    if [ "$(id -u)" -eq 0 ]; then chown "$SERVER_USER" "$SERVER_DIR"; fi
    (cd "$SERVER_DIR" && TZ=UTC as_server "$SERVER_BIN/initdb" --no-sync --auth=trust --username=postgres \
        --encoding=UTF8 --locale=C -D "$SERVER_DIR/data" >/dev/null)
    # Another program may take the port between our choice and the server's start.
    local port
    for _ in 1 2 3 4 5; do
        port=$((10000 + RANDOM % 20000))
        if (cd "$SERVER_DIR" && as_server "$SERVER_BIN/pg_ctl" start -s -w -D "$SERVER_DIR/data" -l "$SERVER_DIR/log" \
            -o "-p $port -k $SERVER_DIR -c listen_addresses=127.0.0.1" 2>/dev/null); then
            # Read by the scripts that source this file.
            # shellcheck disable=SC2034
            SERVER_URL="postgresql://postgres@127.0.0.1:$port/postgres"
            return
        fi
    done
    cat "$SERVER_DIR/log" >&2
    die "the server did not start"
}

stop_server() {
    trap '' HUP INT TERM
    if [ -n "$SERVER_DIR" ]; then
        if [ -f "$SERVER_DIR/data/postmaster.pid" ]; then
            (cd "$SERVER_DIR" && as_server "$SERVER_BIN/pg_ctl" stop -s -m immediate -D "$SERVER_DIR/data") || true
        fi
        rm -rf "$SERVER_DIR"
        SERVER_DIR=
    fi
}
