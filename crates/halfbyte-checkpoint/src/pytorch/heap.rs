//! The values that a pickle makes: an arena, so that nothing recurses, and a value in a thousand places lies in one.

use super::names::Name;
use crate::safetensors::DType;

/// What all values of a pickle may take. A model of 50,000 tensors stays below it.
const MAX_BYTES: usize = 48 << 20;

/// A value with its share of what it owns, as the bound counts it.
const VALUE_BYTES: usize = 64;

/// A value's place among those of its pickle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Id(u32);

/// A storage as a pickle names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Storage<'a> {
    pub key: &'a str,
    /// None: untyped, and the elements are bytes.
    pub dtype: Option<DType>,
    pub elements: u64,
}

/// A tensor as a pickle describes it: a view of a storage.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tensor {
    /// A [`Value::Storage`].
    pub storage: Id,
    /// Its first element in the storage, an integer.
    pub offset: Id,
    /// Its dimensions, a tuple.
    pub size: Id,
    /// Elements of the storage from one index to the next, a tuple.
    pub stride: Id,
    /// None: the storage's.
    pub dtype: Option<DType>,
}

/// A value.
#[derive(Clone, Debug)]
pub(super) enum Value<'a> {
    None,
    Bool(bool),
    Int(i128),
    Text(&'a str),
    Tuple(Vec<Id>),
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Name(Name),
    Storage(Storage<'a>),
    Tensor(Tensor),
    /// Of this kind, which nothing here needs to look into.
    Opaque(&'static str),
}

impl Value<'_> {
    /// What it is, for errors.
    pub fn kind(&self) -> &'static str {
        match self {
            Value::None => "None",
            Value::Bool(_) => "a bool",
            Value::Int(_) => "an integer",
            Value::Text(_) => "a text",
            Value::Tuple(_) => "a tuple",
            Value::List(_) => "a list",
            Value::Dict(_) => "a dict",
            Value::Name(_) => "a name",
            Value::Storage(_) => "a storage",
            Value::Tensor(_) => "a tensor",
            Value::Opaque(kind) => kind,
        }
    }
}

/// The values of one pickle.
#[derive(Debug)]
pub(super) struct Heap<'a> {
    values: Vec<Value<'a>>,
    bytes: usize,
}

impl<'a> Heap<'a> {
    /// The values that most tensors have, once.
    pub const NONE: Id = Id(0);
    pub const FALSE: Id = Id(1);
    pub const TRUE: Id = Id(2);
    pub const ZERO: Id = Id(3);
    pub const ONE: Id = Id(4);
    pub const EMPTY_TUPLE: Id = Id(5);

    pub fn new() -> Self {
        let values = vec![
            Value::None,
            Value::Bool(false),
            Value::Bool(true),
            Value::Int(0),
            Value::Int(1),
            Value::Tuple(Vec::new()),
        ];
        Self { values, bytes: 0 }
    }

    pub fn len(&self) -> usize {
        self.values.len()
    }

    pub fn values(&self) -> &[Value<'a>] {
        &self.values
    }

    pub fn get(&self, id: Id) -> &Value<'a> {
        &self.values[id.0 as usize]
    }

    pub fn index(id: Id) -> usize {
        id.0 as usize
    }

    pub fn text(&self, id: Id) -> Option<&'a str> {
        match self.get(id) {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    pub fn int(&self, id: Id) -> Option<i128> {
        match self.get(id) {
            Value::Int(int) => Some(*int),
            _ => None,
        }
    }

    /// The items of a tuple or list.
    pub fn items(&self, id: Id) -> Option<&[Id]> {
        match self.get(id) {
            Value::Tuple(items) | Value::List(items) => Some(items),
            _ => None,
        }
    }

    /// Adds a value. Error: all together take too much.
    pub fn add(&mut self, value: Value<'a>) -> Result<Id, String> {
        let items = match &value {
            Value::Tuple(items) | Value::List(items) => items.len(),
            Value::Dict(pairs) => 2 * pairs.len(),
            _ => 0,
        };
        self.spend(VALUE_BYTES + items * size_of::<Id>())?;
        let id = Id(self.values.len() as u32);
        self.values.push(value);
        Ok(id)
    }

    /// Appends to a list. Errors: it is none; all together take too much.
    pub fn append(&mut self, list: Id, items: &[Id]) -> Result<(), String> {
        self.spend(2 * size_of_val(items))?;
        match &mut self.values[list.0 as usize] {
            Value::List(list) => list.extend(items),
            other => return Err(format!("expected a list to append to, got {}", other.kind())),
        }
        Ok(())
    }

    /// Appends keys and values, in turn, to a dict. Errors: it is none; a key without a value; all together take too much.
    pub fn set(&mut self, dict: Id, items: &[Id]) -> Result<(), String> {
        self.spend(2 * size_of_val(items))?;
        let (pairs, rest) = items.as_chunks::<2>();
        if !rest.is_empty() {
            return Err("a key of a dict has no value".into());
        }
        match &mut self.values[dict.0 as usize] {
            Value::Dict(dict) => dict.extend(pairs.iter().map(|&[key, value]| (key, value))),
            other => return Err(format!("expected a dict to add to, got {}", other.kind())),
        }
        Ok(())
    }

    fn spend(&mut self, bytes: usize) -> Result<(), String> {
        self.bytes += bytes;
        if self.bytes > MAX_BYTES {
            return Err(format!("its values take more than {} MB", MAX_BYTES >> 20));
        }
        Ok(())
    }
}
