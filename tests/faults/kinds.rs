//! What the holders of a storm do beside plain locks: they take sets and permits, campaign and lead, run jobs once
//! per slot, share keys ([`sharers`](crate::sharers)), and wait in order ([`waiters`](crate::waiters)). The names of keys say what is done with them, to [`kind_rules`](crate::kind_rules) as well.

use std::ops::ControlFlow::{Break, Continue};
use std::thread;
use std::time::Duration;

use postgres::Client;
use syncguard::{ExtendResult, LockError, LockGuard, LockOptions, MultiGuard, Run, RunOnce, Semaphore, Slot};

use crate::history::{MS, now};
use crate::holder::Holder;
use crate::told::{failed, granted, released, shown};

/// How long a slot lasts: shorter than a run often is.
const SLOT: Duration = Duration::from_millis(200);

/// The end of a job's closure.
type Ended = Result<(), &'static str>;

impl Holder<'_> {
    pub fn kind(&mut self) {
        match self.random.below(15) {
            0..3 => self.set(),
            3..5 => self.permit(),
            5 => self.campaign(),
            6..9 => self.share(),
            9..13 => self.wait_in_order(),
            _ => self.job(),
        }
        if self.random.below(4) == 0 {
            self.observe();
        }
        thread::sleep(Duration::from_millis(1 + self.random.below(12)));
    }

    /// A key that others lead, run under or share, for a plain lock.
    pub fn key_of_a_kind(&mut self) -> String {
        let kinds = ["lead0", "plain0", "effect0", "claim0", "every0", "read0", "read1", "turn0", "turn1"];
        kinds[usize::try_from(self.random.below(9)).unwrap_or(0)].to_owned()
    }

    /// In the order of the guard: by their bytes. Twins are taken together only.
    fn keys(&mut self) -> Vec<String> {
        let mut keys = match self.random.below(8) {
            0 => (0..8).map(|n| format!("wide{n}")).collect(),
            1..3 => vec![format!("hot{}", self.random.below(3)), format!("slot{}", now() / (150 * MS))],
            _ => {
                let pair = self.random.below(3);
                ["a", "b"].map(|twin| format!("twin{pair}{twin}")).to_vec()
            }
        };
        if self.random.below(3) == 0 {
            keys.push(format!("hot{}", self.random.below(3)));
        }
        keys.sort();
        keys.dedup();
        keys
    }

    fn set(&mut self) {
        let (keys, ttl, wait) = (self.keys(), self.ttl(), self.wait());
        let options = LockOptions::new().ttl(ttl).timeout(wait).heartbeat(self.heartbeat());
        let once = self.random.below(4) == 0;
        let bound = if once { self.operation } else { wait };
        let options = self.noted(options, 4);
        let Some(guard) = self.lock_all(&keys, (ttl, bound), &options, once) else { return };
        self.hold_all(&guard, ttl);
        if self.random.below(12) == 0 {
            drop(guard);
        } else {
            self.release_all(guard, ttl);
        }
    }

    fn lock_all(
        &self,
        keys: &[String],
        (ttl, bound): (Duration, Duration),
        options: &LockOptions,
        once: bool,
    ) -> Option<MultiGuard> {
        let call = || {
            if once {
                self.client.try_lock_all_with(keys, options)
            } else {
                self.client.lock_all_with(keys, options).map(Some)
            }
        };
        let result = self.op(("acquire", &keys.join("+"), 0, ttl), bound, call, |guard| match guard {
            Ok(Some(guard)) => {
                let fences: Vec<_> = of_all(guard).iter().map(|(_, fence)| fence.to_string()).collect();
                format!("ok {} 0", fences.join(","))
            }
            Ok(None) => "refused".to_owned(),
            Err(error) => self.unknown(error),
        });
        result.ok().flatten()
    }

    fn release_all(&self, guard: MultiGuard, ttl: Duration) -> bool {
        let name = name(&guard);
        let result = self.op(("release", &name, 0, ttl), self.operation, || guard.release(), released);
        result.is_ok()
    }

    fn hold_all(&mut self, guard: &MultiGuard, ttl: Duration) {
        let (leases, name) = (of_all(guard), name(guard));
        let (first, fence) = leases.first().cloned().unwrap_or_default();
        for _ in 0..self.rounds() {
            let at = now();
            if !guard.is_held() {
                // Late work, as of a holder that does not look: it must be refused.
                self.write_under(&first, (fence, ttl), |transaction| guard.fence_transaction(transaction));
                return;
            }
            for (key, fence) in &leases {
                self.say(&format!("H {key} {fence} {} {at}", ttl.as_nanos()));
            }
            match self.random.below(30) {
                0..4 => {
                    self.write_under(&first, (fence, ttl), |transaction| {
                        guard.fence_transaction(transaction)
                    });
                }
                4..6 => {
                    let asked = self.asked(ttl);
                    let _ = self.op(
                        ("extend", &name, 0, asked),
                        self.operation,
                        || guard.extend(asked),
                        |result| match result {
                            Ok(ExtendResult::Extended { .. }) => "ok 0 0".to_owned(),
                            Ok(ExtendResult::NotHeld) => "refused".to_owned(),
                            Err(error) => failed(error),
                        },
                    );
                }
                _ => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Two semaphores, each with two limits in use.
    fn permit(&mut self) {
        let (name, limits) = if self.random.below(2) == 0 { ("sem0", [2, 3]) } else { ("sem1", [1, 4]) };
        let limit = limits[usize::try_from(self.random.below(2)).unwrap_or(0)];
        let (ttl, wait) = (self.ttl(), self.wait());
        let options = LockOptions::new().ttl(ttl).timeout(wait).heartbeat(self.heartbeat());
        let once = self.random.below(4) == 0;
        let bound = if once { self.operation } else { wait };
        let Ok(semaphore) = self.client.semaphore(name, limit) else { return };
        let options = self.noted(options, 4);
        if let Some(guard) = self.acquire_permit(&semaphore, (ttl, bound), &options, once) {
            self.keep(guard, ttl);
        }
    }

    fn acquire_permit(
        &self,
        semaphore: &Semaphore,
        (ttl, bound): (Duration, Duration),
        options: &LockOptions,
        once: bool,
    ) -> Option<LockGuard> {
        let n = self.begin(("acquire", semaphore.name(), 0, ttl), bound, semaphore.limit());
        let result = if once {
            semaphore.try_acquire_with(options)
        } else {
            semaphore.acquire_with(options).map(Some)
        };
        self.end(n, || match &result {
            Ok(Some(guard)) => format!(
                "{} {}",
                granted(guard.fence().get(), guard.expires_at_ms(), ttl),
                guard.permit().unwrap_or(0)
            ),
            Ok(None) => "refused".to_owned(),
            Err(error) => self.unknown(error),
        });
        result.ok().flatten()
    }

    /// Campaigns, leads for a term or two, and steps down. A campaign has no bound.
    fn campaign(&mut self) {
        let (key, ttl) = (format!("lead{}", self.random.below(2)), self.ttl());
        let options = LockOptions::new().ttl(ttl).cancel(self.over).fair(self.random.below(2) == 0);
        let terms = 1 + self.random.below(2);
        let (client, asks) = (self.client, ("acquire", key.as_str(), 0, ttl));
        let mut call = self.begin(asks, Duration::ZERO, 0);
        let mut led = 0;
        let result = client.elect(&key, &options, |term| {
            let fence = term.number().get();
            self.end(call, || format!("ok {fence} 0"));
            for _ in 0..self.rounds() {
                if !self.believe(&key, fence, ttl, || term.is_held()) {
                    self.write_under(&key, (fence, ttl), |transaction| term.fence_transaction(transaction));
                    break;
                }
                if self.random.below(8) == 0 {
                    self.write_under(&key, (fence, ttl), |transaction| term.fence_transaction(transaction));
                } else {
                    thread::sleep(Duration::from_millis(10));
                }
            }
            led += 1;
            if led == terms {
                return Break(());
            }
            call = self.begin(asks, Duration::ZERO, 0);
            Continue(())
        });
        if let Err(error) = result {
            self.end(call, || failed(&error));
        }
    }

    fn observe(&mut self) {
        match self.random.below(3) {
            0 => return self.holders(),
            1 => return self.holder(),
            _ => {}
        }
        let key = format!("lead{}", self.random.below(2));
        let call = || self.client.leader(&key);
        let _ = self.op(("observe", &key, 0, Duration::ZERO), self.operation, call, |leader| match leader {
            Ok(Some(leader)) => {
                self.names(&key, leader.term.get(), leader.owner.as_deref(), None);
                format!("ok {} 0", leader.term)
            }
            Ok(None) => "refused".to_owned(),
            Err(error) => failed(error),
        });
    }

    /// Of one key.
    fn holder(&mut self) {
        let n = self.random.below(2);
        let key = match self.random.below(4) {
            0 => format!("hot{n}"),
            1 => format!("read{n}"),
            2 => format!("long{n}"),
            _ => format!("turn{n}"),
        };
        let call = || self.client.get_by_key(&key);
        let asks = ("observe", "*", 0, Duration::ZERO);
        let _ = self.op(asks, self.operation, call, |found| match found {
            Ok(found) => {
                if let Some(lease) = found {
                    self.names(&key, lease.fence.get(), lease.owner.as_deref(), lease.note.as_deref());
                }
                "ok 0 0".to_owned()
            }
            Err(error) => failed(error),
        });
    }

    /// Of all keys.
    fn holders(&self) {
        let call = || self.client.operator().holders_raw(200);
        let asks = ("observe", "*", 0, Duration::ZERO);
        let _ = self.op(asks, self.operation * 2, call, |holders| match holders {
            Ok(holders) => {
                for lease in holders {
                    let permit = lease.permit.map_or_else(String::new, |number| format!("#{number}"));
                    let key = format!("{}{permit}", lease.key);
                    self.names(&key, lease.fence.get(), lease.owner.as_deref(), lease.note.as_deref());
                }
                "ok 0 0".to_owned()
            }
            Err(error) => failed(error),
        });
    }

    /// A job of one of four kinds, in the slot of now.
    fn job(&mut self) {
        let number = now() / u64::try_from(SLOT.as_nanos()).unwrap_or(1);
        let (job, slot) = match self.random.below(4) {
            0 => ("plain0", Slot::number(number)),
            1 => ("effect0", Slot::number(number)),
            2 => ("claim0", Slot::number(number).claim_at_start()),
            _ => ("every0", Slot::every(SLOT)),
        };
        let ttl = self.ttl();
        let options = LockOptions::new().ttl(ttl).heartbeat(self.heartbeat());
        let (rounds, options) = (self.rounds(), self.noted(options, 4));
        self.run_job((job, slot), ttl, &options, rounds);
    }

    /// Whether no call has failed.
    fn run_job(
        &mut self,
        (job, slot): (&str, Slot),
        ttl: Duration,
        options: &LockOptions,
        rounds: u64,
    ) -> bool {
        let (number, asked) = (if slot.period_ms().is_some() { 0 } else { slot.at(0) }, now());
        let bound = self.operation * if slot.is_claimed_at_start() { 2 } else { 1 };
        let begin = self.begin(("acquire", job, number, ttl), bound, 0);
        let mut finish = None;
        let result = self.client.run_once(job, slot, options, |run| {
            let fence = run.fence().get();
            self.end(begin, || format!("ok {fence} 0"));
            let at = now();
            self.say(&format!("J {job} {} {}", run.slot(), if run.is_held() { at } else { asked }));
            for _ in 0..rounds {
                if !self.believe(job, fence, ttl, || run.is_held()) {
                    break;
                }
                thread::sleep(Duration::from_millis(10));
            }
            let ended = self.work(run, job);
            finish = Some((self.begin(("finish", job, fence, ttl), self.operation * 2, 0), run.slot()));
            ended
        });
        let Some((finish, slot)) = finish else {
            self.end(begin, || match &result {
                Ok(RunOnce::AlreadyDone) => "AlreadyDone".to_owned(),
                Ok(_) => "refused".to_owned(),
                Err(error) => self.unknown(error),
            });
            return result.is_ok();
        };
        self.end(finish, || finished(&result, slot));
        result.is_ok()
    }

    /// What the job does: it fails now and then, and one of a kind has an effect.
    fn work(&mut self, run: &Run, job: &str) -> Ended {
        if !job.starts_with("effect") {
            return if self.random.below(6) == 0 { Err("failed") } else { Ok(()) };
        }
        let nap = Duration::from_millis(self.random.below(25));
        let mut sql = self.connection().ok_or("not connected")?;
        match effect(&mut sql, run, job, nap) {
            Ok(()) => {
                self.sql = Some(sql);
                Ok(())
            }
            // Whether it was committed is for the end of the run to see.
            Err(Failed::Later) if self.random.below(2) == 0 => Ok(()),
            Err(_) => Err("failed"),
        }
    }

    /// Each kind once, on names of its own: `false` if a call failed.
    pub fn practised_kinds(&mut self, key: &str, ttl: Duration) -> bool {
        let options = LockOptions::new().ttl(ttl);
        let keys = ["a", "b"].map(|twin| format!("twin{key}{twin}"));
        let Some(set) = self.lock_all(&keys, (ttl, self.operation), &options, true) else { return false };
        let ended = self.release_all(set, ttl);
        let Ok(semaphore) = self.client.semaphore(&format!("sem{key}"), 2) else { return false };
        let Some(permit) = self.acquire_permit(&semaphore, (ttl, self.operation), &options, true) else {
            return false;
        };
        let shared = self.read_lock(&format!("read{key}"), (ttl, self.operation), &options, true);
        let Some(shared) = shared else { return false };
        if !self.practised_in_order(key, ttl) {
            return false;
        }
        let left = self.leave(shared, ttl);
        let ran = self.run_job((&format!("plain{key}"), Slot::number(now() / MS)), ttl, &options, 1);
        let (key, fence) = (shown(permit.key()), permit.fence().get());
        let freed = self.op(("release", &key, fence, ttl), self.operation, || permit.release(), released);
        ended && ran && left && freed.is_ok()
    }
}

/// How far a transaction with an effect came.
enum Failed {
    /// The run was not completed in it: its end would mark a slot without an effect.
    Before,
    Later,
}

/// The effect and the mark of its slot, in one transaction.
fn effect(sql: &mut Client, run: &Run, job: &str, nap: Duration) -> Result<(), Failed> {
    let mut transaction = sql.transaction().map_err(|_| Failed::Before)?;
    run.complete_in(&mut transaction).map_err(|_| Failed::Before)?;
    thread::sleep(nap);
    let slot = i64::try_from(run.slot()).unwrap_or(0);
    let written = transaction.execute("INSERT INTO effects VALUES ($1, $2)", &[&job, &slot]);
    written.and_then(|_| transaction.commit()).map_err(|_| Failed::Later)
}

fn finished(result: &Result<RunOnce<(), &str>, LockError>, slot: u64) -> String {
    match result {
        Ok(RunOnce::Done(())) => format!("ok {slot} 0"),
        Ok(RunOnce::Failed(_)) => "Failed".to_owned(),
        Ok(_) => "refused".to_owned(),
        Err(error) => failed(error),
    }
}

/// The keys and fences of a set, in order.
fn of_all(guard: &MultiGuard) -> Vec<(String, u64)> {
    let fence = |key: &str| guard.fence(key).map_or(0, syncguard::Fence::get);
    guard.keys().into_iter().map(|key| (key.to_owned(), fence(key))).collect()
}

fn name(guard: &MultiGuard) -> String {
    guard.keys().join("+")
}
