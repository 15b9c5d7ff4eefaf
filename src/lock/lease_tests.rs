//! The lease against its invariants: by example, and by a walk through random orders of events.

use super::*;
use crate::model::time::Clock;

const TTL: Duration = Duration::from_secs(30);

fn s(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn start() -> Moment {
    Clock::manual().now()
}

fn terms(heartbeat: Heartbeat) -> Terms {
    Terms { sent: start(), ttl: TTL, expires_at_ms: 0, version: None, heartbeat, hold_until: Moment::NEVER }
}

fn lease() -> Lease {
    Lease::new(&terms(Heartbeat::Auto))
}

fn at(n: u64) -> Moment {
    start().after(s(n))
}

const OK: Outcome = confirmed(7);

const fn confirmed(version: u64) -> Outcome {
    Outcome::Confirmed { expires_at_ms: 7, version: Some(Version::new(version)) }
}

#[test]
fn a_lease_is_held_until_its_deadline_ticked_or_not() {
    let mut lease = Lease::new(&terms(Heartbeat::Off));
    let last = at(30).since(start()).saturating_sub(Duration::from_nanos(1));
    assert!(lease.is_held(start().after(last)));
    assert!(!lease.is_held(at(30)));
    assert_eq!(lease.tick(start().after(last)), None);
    assert_eq!(lease.tick(at(30)), Some(LostReason::Expired));
    assert_eq!(lease.tick(at(31)), None, "lost once");
    assert!(!lease.is_held(start()));
}

#[test]
fn renewals_are_due_every_third_of_the_ttl_and_count_from_before_they_are_sent() {
    let mut lease = lease();
    assert_eq!(lease.next_renewal(), at(10));
    assert!(lease.begin_renewal(at(9), Duration::ZERO).is_none());
    let (id, ttl) = lease.begin_renewal(at(10), Duration::ZERO).unwrap();
    assert_eq!(ttl, TTL);
    assert!(lease.next_renewal().is_never(), "one at a time");
    assert!(lease.begin_renewal(at(11), Duration::ZERO).is_none());
    assert_eq!(lease.finish(id, at(15), OK), None);
    assert_eq!((lease.end(), lease.next_renewal(), lease.expires_at_ms()), (at(40), at(20), 7));
}

#[test]
fn an_operation_replaces_the_version_of_the_newest_answer() {
    let mut lease = lease();
    assert_eq!(lease.version(), None);
    for (outcome, newest) in [(confirmed(3), 3), (Outcome::Unknown, 3), (confirmed(5), 5)] {
        let id = lease.begin_extend(at(1), TTL).unwrap();
        lease.finish(id, at(1), outcome);
        assert_eq!(lease.version(), Some(Version::new(newest)));
    }
}

#[test]
fn an_answer_to_a_lease_that_is_lost_or_ended_changes_nothing() {
    for ended in [false, true] {
        let mut lease = lease();
        let id = lease.begin_extend(at(1), TTL * 2).unwrap();
        if ended {
            assert!(lease.end_now());
        } else {
            assert_eq!(lease.lose(LostReason::Expired), Some(LostReason::Expired));
        }
        assert_eq!(lease.finish(id, at(2), OK), None);
        assert_eq!((lease.end(), lease.expires_at_ms(), lease.version()), (at(30), 0, None), "{ended}");
    }
}

#[test]
fn of_two_operations_under_way_none_gives_back_what_they_have_lowered() {
    let mut lease = lease();
    let first = lease.begin_extend(at(0), s(20)).unwrap();
    let second = lease.begin_extend(at(1), s(5)).unwrap();
    assert_eq!(lease.end(), at(6));
    for id in [second, first] {
        lease.finish(id, at(2), Outcome::Busy);
        assert_eq!(lease.end(), at(6));
    }
}

#[test]
fn a_renewal_comes_before_a_deadline_that_another_operation_keeps_low() {
    let mut lease = lease();
    let long = lease.begin_extend(at(1), TTL).unwrap();
    let _short = lease.begin_extend(at(1), s(6)).unwrap();
    assert_eq!(lease.finish(long, at(1), OK), None);
    assert_eq!((lease.end(), lease.next_renewal()), (at(7), at(4)));
}

#[test]
fn a_lease_whose_last_renewal_was_refused_is_lost_for_that() {
    let mut lease = lease();
    let (id, _) = lease.begin_renewal(at(10), Duration::ZERO).unwrap();
    assert_eq!(lease.finish(id, at(11), Outcome::Refused), None);
    assert_eq!(lease.tick(at(30)), Some(LostReason::RenewalRefused));
}

#[test]
fn the_less_is_left_the_sooner_a_renewal_is_tried_again() {
    let ms = Duration::from_millis;
    for (left, outcome, pause) in [
        (1_600, Outcome::Busy, 100),
        (1_600, Outcome::Refused, 200),
        (1_600, Outcome::Unknown, 200),
        (60, Outcome::Busy, 20),
        (40, Outcome::Refused, 20),
    ] {
        let mut lease = lease();
        let (id, _) = lease.begin_renewal(at(10), Duration::ZERO).unwrap();
        let now = start().after(TTL.saturating_sub(ms(left)));
        assert_eq!(lease.finish(id, now, outcome), None);
        assert_eq!(lease.next_renewal(), now.after(ms(pause)), "{left}, {outcome:?}");
        assert_eq!(lease.alone(), outcome == Outcome::Busy, "a busy row holds up nobody else's");
    }
}

#[test]
fn an_interval_of_ones_own_is_kept_and_bows_to_a_shorter_ttl() {
    let mut lease = Lease::new(&terms(Heartbeat::Every(s(20))));
    assert_eq!(lease.next_renewal(), at(20));
    let id = lease.begin_extend(at(1), s(8)).unwrap();
    lease.finish(id, at(1), OK);
    assert_eq!(lease.next_renewal(), at(5));
}

#[test]
fn an_unknown_renewal_keeps_the_old_deadline_and_is_tried_again_until_then() {
    let mut lease = lease();
    let mut now = at(10);
    let mut tries = 0;
    while let Some((id, _)) = lease.begin_renewal(now, Duration::ZERO) {
        tries += 1;
        assert_eq!(lease.finish(id, now, Outcome::Unknown), None);
        assert_eq!(lease.end(), at(30));
        if lease.next_renewal().is_never() || tries > 500 {
            break;
        }
        assert!(lease.next_renewal() > now);
        now = lease.next_renewal();
    }
    assert!((10..200).contains(&tries), "{tries}");
    assert_eq!(lease.tick(at(30)), Some(LostReason::Unreachable));
}

#[test]
fn a_busy_row_is_asked_for_again_soon_and_alone() {
    let mut lease = lease();
    let (id, _) = lease.begin_renewal(at(10), Duration::ZERO).unwrap();
    assert!(!lease.alone());
    lease.finish(id, at(10), Outcome::Busy);
    assert!(lease.alone());
    assert!(lease.next_renewal().since(at(10)) <= Duration::from_millis(500));
    let next = lease.next_renewal();
    let (id, _) = lease.begin_renewal(next, Duration::ZERO).unwrap();
    lease.finish(id, next, OK);
    assert!(!lease.alone(), "back with the others");
}

#[test]
fn a_refused_renewal_loses_the_lease_for_good() {
    let mut lease = lease();
    let (id, _) = lease.begin_renewal(at(10), Duration::ZERO).unwrap();
    assert_eq!(lease.finish(id, at(10), Outcome::Gone(LostReason::RowMissing)), Some(LostReason::RowMissing));
    assert!(!lease.is_held(at(10)) && lease.next_renewal().is_never());
    assert!(lease.begin_extend(at(10), TTL).is_none());
}

#[test]
fn an_answer_after_the_deadline_does_not_bring_the_lease_back() {
    let mut lease = lease();
    let (id, _) = lease.begin_renewal(at(29), Duration::ZERO).unwrap();
    assert_eq!(lease.finish(id, at(31), OK), Some(LostReason::Unreachable));
    assert!(!lease.is_held(at(31)));
}

#[test]
fn a_guard_that_ends_during_its_renewal_stays_ended() {
    for outcome in [OK, Outcome::Gone(LostReason::RowMissing), Outcome::Unknown, Outcome::Busy] {
        let mut lease = lease();
        let (id, _) = lease.begin_renewal(at(10), Duration::ZERO).unwrap();
        assert!(lease.end_now());
        assert!(!lease.end_now(), "ended once");
        assert_eq!(lease.finish(id, at(11), outcome), None, "{outcome:?}");
        assert!(lease.next_renewal().is_never() && lease.lost().is_none() && !lease.is_held(at(11)));
    }
}

#[test]
fn the_ttl_of_the_last_extend_is_that_of_later_renewals() {
    for outcome in [OK, Outcome::Unknown] {
        let mut lease = lease();
        let id = lease.begin_extend(at(1), s(60)).unwrap();
        lease.finish(id, at(1), outcome);
        let next = lease.next_renewal();
        assert_eq!(lease.begin_renewal(next, Duration::ZERO).unwrap().1, s(60), "{outcome:?}");
    }
}

#[test]
fn a_shorter_ttl_counts_from_the_moment_it_is_sent() {
    let mut lease = lease();
    let id = lease.begin_extend(at(1), s(2)).unwrap();
    assert_eq!(lease.end(), at(3), "it may be in force already");
    lease.finish(id, at(1), Outcome::Refused);
    assert_eq!(lease.end(), at(30), "it certainly is not");
    let id = lease.begin_extend(at(1), s(2)).unwrap();
    lease.finish(id, at(1), Outcome::Unknown);
    assert_eq!(lease.end(), at(3), "it may be");
}

#[test]
fn max_hold_ends_it_whatever_is_renewed_or_extended() {
    let mut lease = Lease::new(&Terms { hold_until: at(25), ..terms(Heartbeat::Auto) });
    for (sent, next) in [(10, true), (20, false)] {
        let (id, _) = lease.begin_renewal(at(sent), Duration::ZERO).unwrap();
        lease.finish(id, at(sent), OK);
        assert_eq!(!lease.next_renewal().is_never(), next);
    }
    let id = lease.begin_extend(at(21), s(1000)).unwrap();
    lease.finish(id, at(21), OK);
    assert_eq!(lease.tick(at(24)), None);
    assert_eq!(lease.tick(at(25)), Some(LostReason::MaxHold));
}

#[test]
fn without_a_heartbeat_nothing_is_ever_due() {
    let mut lease = Lease::new(&terms(Heartbeat::Off));
    let id = lease.begin_extend(at(1), s(2)).unwrap();
    lease.finish(id, at(1), Outcome::Unknown);
    assert!(lease.next_renewal().is_never());
}

/// The server's row, and the messages on their way to it.
struct World {
    now: Moment,
    /// When the row's lease ends, and the write that made it so.
    expiry: Moment,
    version: u64,
    /// Messages that may still be carried out, however late: number, ttl, the version that they replace.
    under_way: Vec<(u32, Duration, u64)>,
    /// Operations without an answer yet, and the version that they wrote if they were carried out.
    unanswered: Vec<(u32, Option<u64>)>,
    seed: u64,
}

impl World {
    fn random(&mut self, below: u64) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed % below
    }

    /// One message arrives, perhaps not for the last time: it is carried out if the lease is live. Extends
    /// never revive.
    fn arrive(&mut self) {
        if self.under_way.is_empty() {
            return;
        }
        let i = usize::try_from(self.random(self.under_way.len() as u64)).unwrap();
        let (id, ttl, replaced) = self.under_way[i];
        if self.random(3) > 0 {
            self.under_way.swap_remove(i);
        }
        if self.now < self.expiry {
            let end = self.now.after(ttl);
            self.expiry = if replaced == self.version { end } else { self.expiry.max(end) };
            self.version += 1;
            let version = self.version;
            for entry in self.unanswered.iter_mut().filter(|entry| entry.0 == id) {
                entry.1.get_or_insert(version);
            }
        }
    }

    fn send(&mut self, lease: &Lease, id: u32, ttl: Duration) {
        self.under_way.push((id, ttl, lease.version().map_or(0, Version::get)));
        self.unanswered.push((id, None));
    }

    /// Something happens to the lease.
    fn step(&mut self, lease: &mut Lease) {
        let now = self.now;
        match self.random(8) {
            0 => {
                if let Some((id, ttl)) = lease.begin_renewal(now, Duration::ZERO) {
                    self.send(lease, id, ttl);
                }
            }
            1 if self.unanswered.len() < 3 => {
                let ttl = s(1 + self.random(40));
                if let Some(id) = lease.begin_extend(now, ttl) {
                    self.send(lease, id, ttl);
                }
            }
            2 | 3 if !self.unanswered.is_empty() => {
                let i = usize::try_from(self.random(self.unanswered.len() as u64)).unwrap();
                let (id, written) = self.unanswered.swap_remove(i);
                let lost_answer = self.random(3) == 0;
                let outcome = match (written, lost_answer) {
                    (Some(version), false) => confirmed(version),
                    (None, false) => {
                        // Answered without having been carried out: it never will be.
                        self.under_way.retain(|message| message.0 != id);
                        if now >= self.expiry { Outcome::Gone(LostReason::Expired) } else { Outcome::Refused }
                    }
                    // Carried out or not, or still to come, whenever it likes.
                    (_, true) => Outcome::Unknown,
                };
                lease.finish(id, now, outcome);
            }
            4 | 5 => self.arrive(),
            6 => {
                lease.tick(now);
            }
            _ => self.now = now.after(Duration::from_millis(self.random(4000))),
        }
    }
}

#[test]
fn whatever_the_order_of_events_a_held_lease_is_live_on_the_server() {
    let (mut confirmed_late, mut held_late) = (0, 0);
    for run in 1..40_000_u64 {
        let mut lease = lease();
        let mut world = World {
            now: start(),
            expiry: at(30),
            version: 0,
            under_way: Vec::new(),
            unanswered: Vec::new(),
            seed: run.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
        };
        let mut was_lost = false;
        let mut ended = false;
        for step in 0..120 {
            if world.random(200) == 0 {
                ended |= lease.end_now();
            }
            world.step(&mut lease);
            let held = lease.is_held(world.now);
            // 1 and 4: live now, and at every moment up to the deadline if nothing else is sent.
            if held {
                assert!(
                    world.expiry >= lease.end(),
                    "run {run}, step {step}: trusted beyond the server's end"
                );
            }
            // 2 and 3: for good.
            assert!(!(held && (was_lost || ended)), "run {run}, step {step}: revived");
            was_lost |= !held;
            // 5: nothing is due that must not go out.
            if lease.lost().is_some() || ended {
                assert!(lease.next_renewal().is_never());
            }
            confirmed_late += u32::from(held && world.now > at(30));
            held_late += u32::from(held && world.now > at(60));
        }
    }
    assert!(
        confirmed_late > 10_000 && held_late > 1_000,
        "the walk went nowhere: {confirmed_late} {held_late}"
    );
}
