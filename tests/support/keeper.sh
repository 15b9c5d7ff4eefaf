# Owns one temporary directory and ends with its owner: `sh -c THIS keeper BASE [UID:GID]`.
#
# Prints the directory it made, then waits for the end of its input. That comes when the test
# process closes the pipe or dies of anything, SIGKILL included. Then the server whose process id
# is in DIR/pid is stopped at once, and the directory goes.
trap '' INT TERM HUP
dir=$(mktemp -d "$1/syncguard.XXXXXX") || exit 1
[ -z "$2" ] || chown "$2" "$dir" || exit 1
echo "$dir"
exec >/dev/null 2>&1
while read -r _; do :; done

# A process is ours when its command line names our directory: the id may have been used again.
ours() {
    if [ -r /proc/self/cmdline ]; then
        tr '\0' ' ' <"/proc/$1/cmdline"
    else
        ps -o args= -p "$1"
    fi | grep -qF -- "$dir/"
}

pid=$(cat "$dir/pid")
tries=0
if [ -n "$pid" ] && ours "$pid"; then
    kill -s CONT "$pid"
    kill -s QUIT "$pid"
    while ours "$pid" && [ "$tries" -lt 300 ]; do
        tries=$((tries + 1))
        [ "$tries" -ne 200 ] || kill -s KILL "$pid"
        sleep 0.05
    done
fi

# A server that was killed leaves its small System V segment behind: line 7 is "KEY ID".
segment=$(sed -n '7s/^ *[0-9][0-9]*  *\([0-9][0-9]*\) *$/\1/p' "$dir/data/postmaster.pid")
[ -z "$segment" ] || ipcrm -m "$segment"

# Something that was being started may still write here for a moment.
tries=0
until rm -rf "$dir" && [ ! -e "$dir" ] || [ "$tries" -ge 200 ]; do
    tries=$((tries + 1))
    sleep 0.05
done
