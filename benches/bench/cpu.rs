//! Processor time, and memory, as the kernel counts them.

use std::fs;
use std::time::Duration;

/// What this process has used so far.
pub(crate) fn client() -> Duration {
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(spent.tv_sec).unwrap(), u32::try_from(spent.tv_nsec).unwrap())
}

/// What the children of a server's first process have used so far.
pub(crate) fn server(postmaster: u32) -> Duration {
    let mut nanos = 0;
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let path = entry.path();
        let Ok(stat) = fs::read_to_string(path.join("stat")) else { continue };
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1)?.parse().ok());
        if parent == Some(postmaster) {
            let schedule = fs::read_to_string(path.join("schedstat")).unwrap_or_default();
            nanos += schedule.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0);
        }
    }
    Duration::from_nanos(nanos)
}
