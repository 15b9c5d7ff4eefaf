//! Values: what a lock is made of, validated once, when they come in.
//!
//! Nothing in here does I/O. Whatever a caller hands in becomes one of these types, or an
//! [`InvalidArgument`](crate::ErrorCode::InvalidArgument), before any connection is touched.

pub(crate) mod fence;
pub(crate) mod hash;
pub(crate) mod key;
pub(crate) mod lock_id;
pub(crate) mod time;
