//! Who is whose child, among the tokens that somebody holds and that have not fired.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{Hook, Node};
use crate::sync::Mutex;

/// Tokens that are related, over however many others, or once were. Two families become one when a
/// token gets parents in both; a family never splits.
#[derive(Default)]
pub(super) struct Family {
    members: BTreeMap<Name, Member>,
}

/// The address of a member: nobody else has it as long as the family keeps the node.
type Name = usize;

/// Each relation is noted at both ends.
struct Member {
    node: Arc<Node>,
    parents: BTreeSet<Name>,
    children: BTreeSet<Name>,
}

/// Makes a new token the child of these; a child of a fired token is born fired.
pub(super) fn add(child: &Arc<Node>, parents: &[&Arc<Node>]) {
    let Some((first, others)) = parents.split_first() else { return };
    while !parents.iter().any(|parent| parent.has_fired()) {
        for other in others {
            unite(first, other);
        }
        let home = home(first);
        let mut family = home.lock();
        if parents.iter().all(|parent| parent.lives_in(&home) && !parent.has_fired()) {
            family.insert(child);
            *child.home.lock() = Some(Arc::clone(&home));
            for parent in parents {
                family.relate(name(parent), name(child));
            }
            return;
        }
    }
    child.fire();
}

/// Fires the token and its descendants, of which none has a parent or child afterwards. Returns
/// their hooks, which the caller runs.
pub(super) fn fire(node: &Arc<Node>) -> Vec<Hook> {
    in_family(node, |family| family.fire(node))
}

/// Takes out the token, whose last handle is going: its children become its parents' children.
pub(super) fn remove(node: &Arc<Node>) {
    in_family(node, |family| family.remove(name(node)));
}

fn name(node: &Arc<Node>) -> Name {
    Arc::as_ptr(node) as usize
}

/// The family of a token; one of its own to begin with.
fn home(node: &Arc<Node>) -> Arc<Mutex<Family>> {
    let found = || {
        let mut family = Family::default();
        family.insert(node);
        Arc::new(Mutex::new(family))
    };
    Arc::clone(node.home.lock().get_or_insert_with(found))
}

fn in_family<R>(node: &Arc<Node>, act: impl FnOnce(&mut Family) -> R) -> R {
    loop {
        let home = home(node);
        let mut family = home.lock();
        // It may have become part of another one before we had the mutex.
        if node.lives_in(&home) {
            return act(&mut family);
        }
    }
}

/// Makes one family of two, at the cost of the smaller one; or does nothing, if one of the two is
/// becoming part of a third.
fn unite(one: &Arc<Node>, two: &Arc<Node>) {
    let (mut low, mut high) = (home(one), home(two));
    if Arc::ptr_eq(&low, &high) {
        return;
    }
    if Arc::as_ptr(&low) > Arc::as_ptr(&high) {
        std::mem::swap(&mut low, &mut high);
    }
    let (mut first, mut second) = (low.lock(), high.lock());
    if ![one, two].iter().all(|node| node.lives_in(&low) || node.lives_in(&high)) {
        return;
    }
    let (from, into, home) = if first.members.len() < second.members.len() {
        (&mut *first, &mut *second, &high)
    } else {
        (&mut *second, &mut *first, &low)
    };
    for member in from.members.values() {
        *member.node.home.lock() = Some(Arc::clone(home));
    }
    into.members.append(&mut from.members);
}

impl Node {
    fn lives_in(&self, family: &Arc<Mutex<Family>>) -> bool {
        self.home.lock().as_ref().is_some_and(|home| Arc::ptr_eq(home, family))
    }
}

impl Family {
    fn insert(&mut self, node: &Arc<Node>) {
        let (parents, children) = (BTreeSet::new(), BTreeSet::new());
        self.members.insert(name(node), Member { node: Arc::clone(node), parents, children });
    }

    fn relate(&mut self, parent: Name, child: Name) {
        if let Some(member) = self.members.get_mut(&parent) {
            member.children.insert(child);
        }
        if let Some(member) = self.members.get_mut(&child) {
            member.parents.insert(parent);
        }
    }

    fn take(&mut self, name: Name) -> Option<Member> {
        let member = self.members.remove(&name)?;
        for parent in &member.parents {
            if let Some(parent) = self.members.get_mut(parent) {
                parent.children.remove(&name);
            }
        }
        for child in &member.children {
            if let Some(child) = self.members.get_mut(child) {
                child.parents.remove(&name);
            }
        }
        Some(member)
    }

    fn fire(&mut self, first: &Arc<Node>) -> Vec<Hook> {
        // Also one that is no member any more, because it has fired.
        let mut hooks: Vec<Hook> = first.fire().into_values().collect();
        let mut waiting = vec![name(first)];
        while let Some(next) = waiting.pop() {
            // It may be waiting twice, as the child of two.
            let Some(member) = self.take(next) else { continue };
            hooks.extend(member.node.fire().into_values());
            waiting.extend(member.children);
        }
        hooks
    }

    fn remove(&mut self, name: Name) {
        let Some(member) = self.take(name) else { return };
        for child in &member.children {
            for parent in &member.parents {
                self.relate(*parent, *child);
            }
        }
    }

    /// How many tokens are related to this one, itself among them.
    #[cfg(test)]
    fn relatives(&self, node: &Arc<Node>) -> usize {
        let (mut seen, mut waiting) = (BTreeSet::new(), vec![name(node)]);
        while let Some(next) = waiting.pop() {
            if let Some(member) = self.members.get(&next).filter(|_| seen.insert(next)) {
                waiting.extend(member.parents.iter().chain(&member.children));
            }
        }
        seen.len()
    }
}

/// How many tokens are related to this one, itself among them; and how many its family has.
#[cfg(test)]
pub(super) fn relatives(node: &Arc<Node>) -> (usize, usize) {
    in_family(node, |family| (family.relatives(node), family.members.len()))
}
