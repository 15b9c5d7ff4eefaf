//! The contract of a [`LockBackend`], as tests that any backend can be put through.
//!
//! For people who write a backend; [`syncguard::backend`] says how, and
//! `examples/own_backend.rs` in the repository is one.
//!
//! ```toml
//! [dev-dependencies]
//! syncguard-contract = "0.1"
//! ```
//!
//! Write a [`Harness`] that opens the store under test and reaches behind the port where the suite
//! must, and let [`contract_tests!`] make a `#[test]` of each case:
//!
//! ```
//! use std::sync::Arc;
//! use syncguard::{LockBackend, MemoryBackend};
//! use syncguard_contract::Harness;
//!
//! struct Memory(MemoryBackend);
//!
//! impl Harness for Memory {
//!     fn backend(&self) -> Arc<dyn LockBackend> {
//!         Arc::new(self.0.clone())
//!     }
//!     fn now_ms(&self) -> i64 {
//!         self.0.server_time()
//!     }
//!     fn age(&self, key: &str, past_expiry_ms: i64) {
//!         assert!(self.0.age(key, past_expiry_ms).unwrap());
//!     }
//!     fn has_row(&self, key: &str) -> bool {
//!         self.0.has_row(key)
//!     }
//!     fn remove_row(&self, key: &str) {
//!         self.0.remove(key).unwrap();
//!     }
//!     fn counter(&self, key: &str) -> Option<u64> {
//!         self.0.counter(key)
//!     }
//!     fn set_counter(&self, key: &str, value: u64) {
//!         self.0.set_counter(key, value).unwrap();
//!     }
//! }
//!
//! mod memory {
//!     syncguard_contract::contract_tests!(super::Memory(syncguard::MemoryBackend::manual()));
//! }
//! # syncguard_contract::run_all(&Memory(MemoryBackend::manual()));
//! ```
//!
//! Each case uses keys of its own (the hooks get plain ASCII), so cases may run at once, and on a
//! store that others use. They leave rows and counters behind, and rely on the deciding
//! clock not being changed meanwhile; a call should take well under half a second.

mod bench;
mod cancelling;
mod fences;
mod keys;
mod labels;
mod once;
mod ownership;
mod permits;
mod racing;
mod reading;
mod renewals;
mod several;
mod shared;
mod times;
mod turns;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use syncguard::backend::LockBackend;

use bench::Bench;

/// The store under test, and what the suite does to it behind the port.
pub trait Harness: Send + Sync {
    /// A client of the store. All clients of one harness share the store.
    fn backend(&self) -> Arc<dyn LockBackend>;

    /// The time of the clock that decides liveness, in Unix milliseconds.
    fn now_ms(&self) -> i64;

    /// Sets the stored expiry of the key's row to this many milliseconds ago. The row exists.
    fn age(&self, key: &str, past_expiry_ms: i64);

    /// Whether the key has a row, live or not.
    fn has_row(&self, key: &str) -> bool;

    /// Deletes the key's row, as an operator would.
    fn remove_row(&self, key: &str);

    /// The key's fence counter.
    fn counter(&self, key: &str) -> Option<u64>;

    /// Sets the key's fence counter, which may not exist yet. Values fit `i64`.
    fn set_counter(&self, key: &str, value: u64);

    /// The same kind of store with stored keys of at most this many bytes, so that long keys are
    /// stored under their digest. `None` skips the case that needs it.
    fn with_storage_limit(&self, bytes: usize) -> Option<Box<dyn Harness>> {
        let _ = bytes;
        None
    }
}

/// One case of the contract.
#[derive(Clone, Copy)]
pub struct Case {
    name: &'static str,
    body: fn(&Bench<'_>),
}

impl Case {
    /// What is checked, as a name for a test.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Checks it.
    ///
    /// # Panics
    ///
    /// If the backend does not fulfil it.
    pub fn run(&self, harness: &dyn Harness) {
        (self.body)(&Bench::new(harness));
    }
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Case").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Runs one case by its name. What [`contract_tests!`] calls.
///
/// # Panics
///
/// If the backend does not fulfil it, or there is no such case.
pub fn run(name: &str, harness: &dyn Harness) {
    CASES.iter().find(|case| case.name == name).expect("a case of the contract").run(harness);
}

/// Runs every case, and reports all that failed at the end.
///
/// # Panics
///
/// If one of them did.
pub fn run_all(harness: &dyn Harness) {
    let failed: Vec<&str> = CASES
        .iter()
        .filter(|case| catch_unwind(AssertUnwindSafe(|| case.run(harness))).is_err())
        .map(Case::name)
        .collect();
    assert!(failed.is_empty(), "the backend breaks its contract: {failed:?}");
}

macro_rules! cases {
    ($d:tt $($module:ident::$case:ident,)*) => {
        /// All cases.
        pub const CASES: &[Case] = &[$(Case { name: stringify!($case), body: $module::$case },)*];

        /// Makes one `#[test]` of each case of the contract. The argument makes a harness; it is
        /// evaluated once per test.
        #[macro_export]
        macro_rules! contract_tests {
            ($d harness:expr) => {
                $(
                    #[test]
                    fn $case() {
                        $crate::run(stringify!($case), &$d harness);
                    }
                )*
            };
        }
    };
}

cases! { $
    keys::capabilities_are_the_same_before_and_after_operations,
    keys::canonically_equal_keys_are_one_lock,
    keys::keys_are_measured_in_bytes_of_their_normal_form,
    keys::what_cannot_be_a_key_is_refused_everywhere,
    keys::keys_with_hostile_characters_are_ordinary_keys,
    keys::keys_that_look_alike_are_different_locks,
    keys::lock_ids_of_the_wrong_form_are_refused_everywhere,
    keys::hashed_storage_keys_lead_to_the_right_lock,
    times::a_lease_is_live_until_the_tolerance_is_over,
    times::a_lease_is_dead_after_the_tolerance,
    times::expiry_is_the_authority_s_time_plus_the_ttl,
    times::the_expiry_that_is_returned_is_the_one_that_is_stored,
    times::a_ttl_that_is_too_short_or_too_long_is_refused_and_changes_nothing,
    times::the_shortest_and_the_longest_ttl_are_accepted,
    times::a_deadline_that_is_over_ends_each_call_without_effect,
    fences::the_first_fence_of_a_key_is_one_and_each_grant_adds_one,
    fences::counters_of_different_keys_are_independent,
    fences::fences_survive_release_expiry_and_removal,
    fences::contended_acquires_do_not_advance_the_counter,
    fences::a_counter_above_the_warning_still_grants,
    fences::the_last_fence_is_granted_and_then_nothing_more,
    fences::a_counter_at_or_beyond_its_limit_changes_nothing,
    ownership::a_held_key_is_an_ordinary_answer,
    ownership::each_grant_has_a_fresh_well_formed_id,
    ownership::the_id_alone_is_enough_for_another_client,
    ownership::an_expired_lease_is_replaced_and_its_id_forgotten,
    ownership::the_same_attempt_again_answers_with_its_first_grant,
    ownership::an_attempt_never_takes_what_another_id_holds,
    ownership::a_repeated_attempt_never_answers_with_a_dead_lease,
    ownership::an_id_in_use_for_another_key_is_an_error_without_effect,
    ownership::release_works_once,
    ownership::a_late_release_spares_the_next_owner,
    ownership::a_refused_release_leaves_the_row_and_the_counter,
    ownership::extend_replaces_the_rest_of_the_ttl,
    ownership::extend_changes_only_the_expiry,
    ownership::extend_revives_and_creates_nothing,
    ownership::unknown_ids_are_harmless,
    renewals::live_leases_are_renewed,
    renewals::only_who_names_the_newest_version_shortens_a_lease,
    renewals::a_lease_granted_again_under_the_same_id_is_lost_to_its_old_holder,
    renewals::lost_leases_say_how_they_were_lost,
    renewals::each_lease_of_a_batch_has_its_own_outcome_in_order,
    renewals::an_empty_batch_is_nothing,
    renewals::guards_calls_answer_like_the_plain_operations,
    reading::is_locked_follows_the_lease,
    reading::reading_changes_nothing,
    reading::lookup_by_key_and_by_id_find_the_same,
    reading::lookup_never_shows_raw_values,
    reading::expired_missing_and_released_leases_look_the_same,
    reading::raw_lookup_shows_the_normal_key_and_the_id,
    reading::the_helpers_agree_with_lookup,
    several::several_keys_are_granted_together_and_each_has_a_lease_of_its_own,
    several::one_held_key_refuses_the_whole_set_and_is_named,
    several::dead_leases_do_not_stand_in_the_way_of_a_set,
    several::the_same_set_again_answers_with_its_first_grants,
    several::a_part_of_a_set_is_not_the_set_and_is_released,
    several::a_counter_at_its_limit_refuses_the_whole_set,
    several::several_leases_are_released_at_once_and_each_has_its_own_outcome,
    several::what_is_no_set_of_keys_is_refused_and_changes_nothing,
    several::a_set_ends_with_its_token_and_its_deadline_without_effect,
    several::sets_that_overlap_are_granted_one_after_the_other,
    once::a_slot_runs_until_it_is_finished_and_never_again,
    once::a_slot_that_is_not_above_the_last_one_is_done,
    once::the_kinds_of_slots_have_marks_of_their_own,
    once::a_period_is_that_of_the_clock_of_the_grant,
    once::a_run_and_a_plain_lease_exclude_each_other,
    once::the_same_begin_again_answers_with_its_first_grant,
    once::only_the_lease_of_the_grant_marks_its_slot,
    once::a_claim_marks_the_slot_and_leaves_the_lease,
    once::a_verify_ends_the_lease_only_where_the_mark_is,
    once::what_cannot_be_a_slot_is_refused_and_changes_nothing,
    once::a_fired_token_ends_a_begin_without_effect,
    once::one_of_many_begins_a_slot,
    cancelling::a_fired_token_aborts_each_operation_without_effect,
    cancelling::a_token_that_has_not_fired_changes_nothing,
    cancelling::the_release_of_guards_is_not_cancelled,
    racing::one_of_many_takes_a_free_key,
    racing::one_of_many_takes_an_expired_key,
    racing::one_of_many_releases_succeeds,
    racing::one_attempt_made_many_times_at_once_is_one_grant,
    racing::an_extend_and_a_take_over_never_both_succeed,
    racing::fences_are_handed_out_once_and_in_the_order_of_the_grants,
    racing::lookups_never_mix_two_owners,
    shared::readers_share_a_key_and_no_writer_has_it_beside_them,
    shared::readers_are_shown_as_such,
    shared::a_reader_is_extended_and_released_by_its_id,
    shared::the_same_attempt_of_a_reader_again_answers_with_its_first_grant,
    shared::a_batch_renews_the_readers_of_a_key_together,
    shared::readers_of_a_group_that_is_gone_are_lost,
    shared::readers_whose_group_is_over_are_lost_and_the_key_is_free,
    shared::a_reader_yields_to_a_writer_that_has_waited_longer,
    shared::bad_keys_ids_and_ttls_of_readers_are_refused,
    shared::racing_readers_and_writers_exclude_each_other,
    labels::a_holder_is_shown_in_its_own_words,
    labels::what_a_holder_said_is_never_shown_for_the_next_one,
    labels::sets_permits_and_readers_are_shown_in_their_holder_s_words,
    labels::a_label_that_cannot_be_kept_is_refused_and_changes_nothing,
    turns::a_live_ticket_that_is_ahead_is_yielded_to,
    turns::a_ticket_ends_by_itself_when_it_is_withdrawn_and_when_it_claims_too_much,
    turns::a_ticket_that_is_said_again_becomes_older_and_never_younger,
    turns::nobody_is_behind_its_own_ticket,
    turns::a_grant_puts_the_next_one_in_line,
    turns::the_same_attempt_in_turn_again_answers_with_its_first_grant,
    turns::bad_keys_and_ids_of_tickets_are_refused,
    permits::as_many_permits_are_granted_as_the_limit_says,
    permits::a_permit_is_a_lease_under_a_key_of_its_own,
    permits::the_same_attempt_for_a_permit_again_answers_with_its_first_grant,
    permits::permits_beyond_a_lowered_limit_are_counted_and_not_granted,
    permits::what_cannot_be_a_permit_is_refused_without_effect,
    permits::a_fired_token_or_a_deadline_ends_a_call_for_a_permit,
    permits::permits_are_renewed_under_the_keys_of_their_guards,
    permits::of_many_as_many_get_a_permit_as_there_are,
}
