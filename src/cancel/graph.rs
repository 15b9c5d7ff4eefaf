//! Who is whose child, among the tokens that somebody holds and that have not fired.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::sync::{Condvar, Mutex};

/// One token, shared by its handles and by whoever waits for it.
#[derive(Default)]
pub(super) struct Node {
    fired: AtomicBool,
    pub(super) hooks: Mutex<Hooks>,
    pub(super) changed: Condvar,
    /// Its graph, once it has had a parent or a child.
    pub(super) graph: Mutex<Option<Arc<Mutex<Graph>>>>,
}

pub(super) type Hook = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub(super) struct Hooks {
    pub(super) next: u64,
    pub(super) list: HashMap<u64, Hook>,
}

impl Node {
    fn is_in(&self, graph: &Arc<Mutex<Graph>>) -> bool {
        self.graph.lock().as_ref().is_some_and(|own| Arc::ptr_eq(own, graph))
    }

    pub(super) fn has_fired(&self) -> bool {
        self.fired.load(Ordering::SeqCst)
    }

    /// Fires this token alone. Its hooks are the caller's to run.
    fn fire(&self) -> HashMap<u64, Hook> {
        let mut hooks = self.hooks.lock();
        self.fired.store(true, Ordering::SeqCst);
        self.changed.notify_all();
        std::mem::take(&mut hooks.list)
    }
}

/// Tokens that are related, over however many others, or once were. Two graphs become one when a
/// token gets parents in both; a graph never splits.
#[derive(Default)]
pub(super) struct Graph {
    members: BTreeMap<Name, Member>,
}

/// The address of a member: nobody else has it as long as the graph keeps the node.
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
            merge(first, other);
        }
        let shared = graph_of(first);
        let mut graph = shared.lock();
        if parents.iter().all(|parent| parent.is_in(&shared) && !parent.has_fired()) {
            graph.insert(child);
            *child.graph.lock() = Some(Arc::clone(&shared));
            for parent in parents {
                graph.relate(name(parent), name(child));
            }
            return;
        }
    }
    child.fire();
}

/// Fires the token and its descendants, of which none has a parent or child afterwards. Returns
/// their hooks, which the caller runs.
pub(super) fn fire(node: &Arc<Node>) -> Vec<Hook> {
    in_graph(node, |graph| graph.fire(node))
}

/// Takes out the token, whose last handle is going: its children become its parents' children.
pub(super) fn remove(node: &Arc<Node>) {
    in_graph(node, |graph| graph.remove(name(node)));
}

fn name(node: &Arc<Node>) -> Name {
    Arc::as_ptr(node) as usize
}

/// The graph of a token; one of its own to begin with.
fn graph_of(node: &Arc<Node>) -> Arc<Mutex<Graph>> {
    let found = || {
        let mut graph = Graph::default();
        graph.insert(node);
        Arc::new(Mutex::new(graph))
    };
    Arc::clone(node.graph.lock().get_or_insert_with(found))
}

fn in_graph<R>(node: &Arc<Node>, act: impl FnOnce(&mut Graph) -> R) -> R {
    loop {
        let shared = graph_of(node);
        let mut graph = shared.lock();
        // It may have become part of another one before we had the mutex.
        if node.is_in(&shared) {
            return act(&mut graph);
        }
    }
}

/// Makes one graph of two, at the cost of the smaller one; or does nothing, if one of the two is
/// becoming part of a third.
fn merge(one: &Arc<Node>, two: &Arc<Node>) {
    let (mut low, mut high) = (graph_of(one), graph_of(two));
    if Arc::ptr_eq(&low, &high) {
        return;
    }
    if Arc::as_ptr(&low) > Arc::as_ptr(&high) {
        std::mem::swap(&mut low, &mut high);
    }
    let (mut first, mut second) = (low.lock(), high.lock());
    if ![one, two].iter().all(|node| node.is_in(&low) || node.is_in(&high)) {
        return;
    }
    let (from, into, graph) = if first.members.len() < second.members.len() {
        (&mut *first, &mut *second, &high)
    } else {
        (&mut *second, &mut *first, &low)
    };
    for member in from.members.values() {
        *member.node.graph.lock() = Some(Arc::clone(graph));
    }
    into.members.append(&mut from.members);
}

impl Graph {
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
    fn related(&self, node: &Arc<Node>) -> usize {
        let (mut seen, mut waiting) = (BTreeSet::new(), vec![name(node)]);
        while let Some(next) = waiting.pop() {
            if let Some(member) = self.members.get(&next).filter(|_| seen.insert(next)) {
                waiting.extend(member.parents.iter().chain(&member.children));
            }
        }
        seen.len()
    }
}

/// How many tokens are related to this one, itself among them; and how many its graph has.
#[cfg(test)]
pub(super) fn related(node: &Arc<Node>) -> (usize, usize) {
    in_graph(node, |graph| (graph.related(node), graph.members.len()))
}
