use super::*;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use crate::sync::Mutex;

#[test]
fn a_waiter_is_woken_by_cancel() {
    let token = CancelToken::new();
    let waiter = token.clone();
    let thread = thread::spawn(move || waiter.wait_timeout(Duration::from_secs(60)));
    token.cancel();
    assert!(thread.join().unwrap());
}

#[test]
fn a_wait_without_cancel_ends_with_false() {
    assert!(!CancelToken::new().wait_timeout(Duration::from_millis(1)));
    assert!(!CancelToken::never().wait_timeout(Duration::from_millis(1)));
}

#[test]
fn children_fire_with_their_parent_and_not_the_other_way_round() {
    let parent = CancelToken::new();
    let (first, second) = (parent.child(), parent.child());
    let grandchild = first.child();
    first.cancel();
    assert!(grandchild.is_cancelled() && !second.is_cancelled() && !parent.is_cancelled());
    parent.cancel();
    assert!(second.is_cancelled());
    assert!(parent.child().is_cancelled(), "a child of a fired token is born fired");
}

#[test]
fn a_grandchild_outlives_the_child_between() {
    let root = CancelToken::new();
    let grandchild = root.child().child();
    root.cancel();
    assert!(grandchild.is_cancelled());
}

#[test]
fn a_dropped_child_leaves_nothing_at_its_parent() {
    let parent = CancelToken::new();
    for _ in 0..100 {
        drop(parent.child());
    }
    assert_eq!(related(&parent), 1);
    assert!(parent.0.as_ref().unwrap().0.hooks.lock().list.is_empty());
}

#[test]
fn a_hook_runs_once_and_not_after_its_subscription_is_dropped() {
    let count = Arc::new(AtomicU32::new(0));
    let token = CancelToken::new();
    let hook = |count: &Arc<AtomicU32>| {
        let count = Arc::clone(count);
        move || {
            count.fetch_add(1, Ordering::SeqCst);
        }
    };
    let kept = token.subscribe(hook(&count));
    drop(token.subscribe(hook(&count)));
    token.cancel();
    token.cancel();
    assert_eq!(count.load(Ordering::SeqCst), 1);
    let late = token.subscribe(hook(&count));
    assert_eq!(count.load(Ordering::SeqCst), 2, "a late hook runs at once");
    drop((kept, late));
}

#[test]
fn a_hook_that_will_have_its_turn_cannot_be_taken_away() {
    use std::sync::mpsc::channel;
    let token = CancelToken::new();
    let ((tell, running), (open, gate)) = (channel(), channel());
    let gate = Arc::new(Mutex::new(gate));
    let hook = || {
        let (tell, gate) = (tell.clone(), Arc::clone(&gate));
        move || {
            tell.send(()).unwrap();
            gate.lock().recv().unwrap();
        }
    };
    let early = token.subscribe(hook()).unwrap();
    let both = [token.subscribe(hook()).unwrap(), token.subscribe(hook()).unwrap()];
    assert!(early.remove(), "nobody has fired");
    thread::scope(|scope| {
        scope.spawn(|| token.cancel());
        running.recv().unwrap();
        // One runs, the other waits for it.
        assert!(!both.map(Subscription::remove).contains(&true));
        open.send(()).unwrap();
        open.send(()).unwrap();
        running.recv().unwrap();
    });
    let gone = CancelToken::new();
    let left = gone.subscribe(hook()).unwrap();
    drop(gone);
    assert!(left.remove(), "nobody can fire");
}

#[test]
fn a_hook_may_use_its_own_token() {
    let token = CancelToken::new();
    let inside = token.clone();
    let seen = Arc::new(AtomicBool::new(false));
    let result = Arc::clone(&seen);
    let kept = token.subscribe(move || result.store(inside.is_cancelled(), Ordering::SeqCst));
    token.cancel();
    assert!(seen.load(Ordering::SeqCst));
    drop(kept);
}

fn related(token: &CancelToken) -> usize {
    graph::related(&token.0.as_ref().unwrap().0).0
}

/// With less stack than a call per generation could do with.
fn on_a_small_stack(body: impl FnOnce() + Send + 'static) {
    thread::Builder::new().stack_size(128 * 1024).spawn(body).unwrap().join().unwrap();
}

/// More generations than the stack below has bytes to spare for.
const DEEP: usize = 200_000;

#[test]
fn a_chain_of_children_keeps_no_token_that_nobody_holds() {
    on_a_small_stack(|| {
        let root = CancelToken::new();
        let mut last = root.child();
        for _ in 0..DEEP {
            let before = Arc::downgrade(&last.0.as_ref().unwrap().0);
            last = last.child();
            assert!(before.upgrade().is_none());
        }
        assert_eq!(related(&root), 2, "the root and the last");
        root.cancel();
        assert!(last.is_cancelled());
    });
}

#[test]
fn a_chain_of_held_tokens_fires_and_ends_without_recursion() {
    on_a_small_stack(|| {
        let chain = || {
            let mut all = vec![CancelToken::new()];
            for _ in 0..DEEP {
                all.push(all.last().unwrap().child());
            }
            all
        };
        let all = chain();
        assert_eq!(related(&all[0]), all.len());
        all[0].cancel();
        assert!(all.iter().all(CancelToken::is_cancelled));
        drop(all);
        // The root first, and then the other way round.
        let mut all = chain();
        let last = all.last().unwrap().clone();
        all.drain(..).for_each(drop);
        assert_eq!(related(&last), 1);
        let mut all = chain();
        let root = all[0].clone();
        while all.pop().is_some() {}
        assert_eq!(related(&root), 1);
    });
}

#[test]
fn a_token_of_two_fires_with_each_and_fires_neither() {
    for fired in 0..3 {
        let parts = [CancelToken::new(), CancelToken::new(), CancelToken::new()];
        let token = parts.iter().fold(CancelToken::never(), |token, part| token.and(part));
        assert!(!token.is_cancelled());
        parts[fired].cancel();
        assert!(token.is_cancelled());
        assert_eq!(parts.iter().filter(|part| part.is_cancelled()).count(), 1);
        assert!(token.and(&parts[(fired + 1) % 3]).is_cancelled(), "born fired");
    }
    assert!(CancelToken::never().and(&CancelToken::never()).is_never());
}

#[test]
fn a_token_of_many_keeps_each_held_part_once_and_no_other() {
    let (root, other) = (CancelToken::new(), CancelToken::new());
    let mut token = root.clone();
    for _ in 0..10_000 {
        // A part that is dropped still hands its parent's signal on.
        token = token.and(&other.child()).and(&CancelToken::new());
    }
    assert_eq!(graph::related(&token.0.as_ref().unwrap().0), (3, 3));
    other.cancel();
    assert!(token.is_cancelled() && !root.is_cancelled());
}

#[test]
fn hooks_run_after_every_descendant_has_fired() {
    let root = CancelToken::new();
    let last = root.child().child();
    let (seen, inside) = (Arc::new(AtomicBool::new(false)), last.clone());
    let result = Arc::clone(&seen);
    let kept = root.subscribe(move || result.store(inside.is_cancelled(), Ordering::SeqCst));
    root.cancel();
    assert!(seen.load(Ordering::SeqCst));
    drop(kept);
}

#[test]
fn children_that_come_and_go_while_an_ancestor_fires_are_all_reached() {
    for _ in 0..200 {
        let root = CancelToken::new();
        let held: Vec<CancelToken> = thread::scope(|scope| {
            let makers: Vec<_> = (0..4)
                .map(|_| {
                    let root = &root;
                    scope.spawn(move || {
                        let mut last = root.child();
                        let mut held = Vec::new();
                        for i in 0..50 {
                            last = last.child().and(&root.child());
                            if i % 7 == 0 {
                                held.push(last.clone());
                            }
                        }
                        held
                    })
                })
                .collect();
            root.cancel();
            makers.into_iter().flat_map(|maker| maker.join().unwrap()).collect()
        });
        assert!(held.iter().all(CancelToken::is_cancelled));
        assert!(held.iter().all(|token| related(token) <= 1));
    }
}

/// What the tokens should do: nothing is ever forgotten, and firing asks every ancestor.
#[derive(Default)]
struct Model {
    parents: Vec<Vec<usize>>,
    fired: Vec<bool>,
}

impl Model {
    fn fire(&mut self, first: usize) {
        self.fired[first] = true;
        // Parents come before their children.
        for i in first + 1..self.fired.len() {
            self.fired[i] |= self.parents[i].iter().any(|parent| self.fired[*parent]);
        }
    }
}

struct Walker {
    token: CancelToken,
    index: usize,
    ran: Arc<AtomicU32>,
    _kept: Option<Subscription>,
}

#[test]
fn random_walks_agree_with_a_model_that_keeps_everything() {
    for seed in 1..=300_u64 {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut below = |limit: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            usize::try_from(state % limit as u64).unwrap()
        };
        let (mut model, mut held) = (Model::default(), Vec::<Walker>::new());
        for step in 0..150 {
            let what = below(20);
            if held.is_empty() || what == 0 {
                add(&mut model, &mut held, CancelToken::new(), Vec::new());
            } else if what < 9 {
                let parent = &held[below(held.len())];
                let (token, parents) = (parent.token.child(), vec![parent.index]);
                add(&mut model, &mut held, token, parents);
            } else if what < 13 {
                let (one, two) = (&held[below(held.len())], &held[below(held.len())]);
                let (token, parents) = (one.token.and(&two.token), vec![one.index, two.index]);
                if one.index != two.index {
                    add(&mut model, &mut held, token, parents);
                }
            } else if what < 19 {
                held.swap_remove(below(held.len()));
            } else {
                let fired = &held[below(held.len())];
                model.fire(fired.index);
                fired.token.cancel();
            }
            for walker in &held {
                let fired = model.fired[walker.index];
                assert_eq!(walker.token.is_cancelled(), fired, "seed {seed}, step {step}");
                assert_eq!(walker.ran.load(Ordering::SeqCst), u32::from(fired), "seed {seed}, step {step}");
            }
            if let Some(walker) = held.last() {
                let (related, all) = graph::related(&walker.token.0.as_ref().unwrap().0);
                assert!(related <= all && all <= held.len(), "seed {seed}, step {step}");
            }
        }
    }
}

fn add(model: &mut Model, held: &mut Vec<Walker>, token: CancelToken, parents: Vec<usize>) {
    let ran = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&ran);
    let kept = token.subscribe(move || {
        counter.fetch_add(1, Ordering::SeqCst);
    });
    model.fired.push(parents.iter().any(|parent| model.fired[*parent]));
    model.parents.push(parents);
    held.push(Walker { token, index: model.fired.len() - 1, ran, _kept: kept });
}
