//! Processor time, and memory, as the kernel counts them.

use std::fs;
use std::time::Duration;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Runs something with this thread, the threads that it starts, and the server's new processes on one
/// processor. A message and its answer take three times as long if the scheduler puts the two ends on
/// two processors that were idle: that is a property of the machine, and it comes and goes.
pub(crate) fn on_one<R>(postmaster: u32, work: impl FnOnce() -> R) -> R {
    let all = sched_getaffinity(None).unwrap();
    let mut one = CpuSet::new();
    let last = (0..CpuSet::MAX_CPU).rev().find(|&cpu| all.is_set(cpu)).unwrap();
    one.set(last);
    let server = Pid::from_raw(i32::try_from(postmaster).unwrap());
    sched_setaffinity(None, &one).unwrap();
    sched_setaffinity(server, &one).unwrap();
    let result = work();
    sched_setaffinity(None, &all).unwrap();
    sched_setaffinity(server, &all).unwrap();
    result
}

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
