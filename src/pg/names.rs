//! Operators and types by their full names, so that nobody's schema can slip one of its own in,
//! whatever the `search_path` (<https://www.postgresql.org/docs/current/typeconv-func.html>).

pub(crate) const EQ: &str = "OPERATOR(pg_catalog.=)";
pub(crate) const NE: &str = "OPERATOR(pg_catalog.<>)";
pub(crate) const GT: &str = "OPERATOR(pg_catalog.>)";
pub(crate) const GE: &str = "OPERATOR(pg_catalog.>=)";
pub(crate) const LE: &str = "OPERATOR(pg_catalog.<=)";
pub(crate) const LT: &str = "OPERATOR(pg_catalog.<)";
pub(crate) const PLUS: &str = "OPERATOR(pg_catalog.+)";
pub(crate) const MINUS: &str = "OPERATOR(pg_catalog.-)";
pub(crate) const MOD: &str = "OPERATOR(pg_catalog.%)";
pub(crate) const CAT: &str = "OPERATOR(pg_catalog.||)";
pub(crate) const COUNT: &str = "pg_catalog.count(*)";

pub(crate) const TEXT: &str = "pg_catalog.text";
pub(crate) const INT: &str = "pg_catalog.int8";
pub(crate) const TEXTS: &str = "pg_catalog.text[]";
pub(crate) const INTS: &str = "pg_catalog.int8[]";

/// Names from `pg_catalog` before all others in this transaction (a temporary type would come first
/// otherwise), for statements that are written with plain operators.
pub(crate) const PLAIN_NAMES: &str = "SET LOCAL search_path TO pg_catalog, pg_temp";
