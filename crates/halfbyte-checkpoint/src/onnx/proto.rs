//! The wire format of protocol buffers, as far as ONNX needs it: read as ranges of the file, written to a buffer.
//!
//! ```text
//! message = (key value)*     key = varint(field number · 8 + wire type)
//! wire type 0: varint │ 1: 8 bytes │ 2: varint length, that many bytes │ 5: 4 bytes
//! ```
//!
//! Tensors stay where they are in the mapped file; a library that builds messages would copy each of them. Errors are
//! texts to which the caller adds file and tensor. Source: the encoding as protobuf.dev describes it.

use std::ops::Range;

/// What can go wrong here, without the place.
pub(super) type Result<T> = std::result::Result<T, String>;

/// Fields of one message that are read: what is kept of each may be a few times as long as the field itself.
const MAX_FIELDS: usize = 1 << 22;

/// Bytes of a file that hold a message, a string, or packed numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slice<'a> {
    file: &'a [u8],
    start: usize,
    end: usize,
}

/// A field of a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field<'a> {
    pub number: u32,
    value: Value<'a>,
}

#[derive(Clone, Copy, Debug)]
enum Value<'a> {
    Varint(u64),
    Fixed64(Slice<'a>),
    Delimited(Slice<'a>),
    Fixed32(Slice<'a>),
}

impl<'a> Slice<'a> {
    pub fn whole(file: &'a [u8]) -> Self {
        Self { file, start: 0, end: file.len() }
    }

    /// Place in the file.
    pub fn range(self) -> Range<usize> {
        self.start..self.end
    }

    pub fn bytes(self) -> &'a [u8] {
        &self.file[self.start..self.end]
    }

    pub fn text(self) -> Result<&'a str> {
        std::str::from_utf8(self.bytes()).map_err(|_| format!("the string at byte {} is not UTF-8", self.start))
    }

    /// The fields, in order; an error is the last item.
    pub fn fields(mut self) -> impl Iterator<Item = Result<Field<'a>>> {
        let mut count = 0;
        std::iter::from_fn(move || {
            (self.start < self.end).then(|| {
                count += 1;
                let field = if count > MAX_FIELDS {
                    Err(format!("the message before byte {} has more than {MAX_FIELDS} fields", self.start))
                } else {
                    self.field()
                };
                if field.is_err() {
                    self.start = self.end;
                }
                field
            })
        })
    }

    /// The numbers of a packed field, in order; an error is the last item.
    pub fn varints(mut self) -> impl Iterator<Item = Result<u64>> {
        std::iter::from_fn(move || {
            (self.start < self.end).then(|| {
                let number = self.varint();
                if number.is_err() {
                    self.start = self.end;
                }
                number
            })
        })
    }

    fn field(&mut self) -> Result<Field<'a>> {
        let at = self.start;
        let key = self.varint()?;
        let number = u32::try_from(key >> 3).ok().filter(|number| (1..1 << 29).contains(number));
        let Some(number) = number else {
            return Err(format!("the field at byte {at} has the number {}, which none may have", key >> 3));
        };
        let value = match key & 7 {
            0 => Value::Varint(self.varint()?),
            1 => Value::Fixed64(self.take(8, at)?),
            2 => {
                let length = self.varint()?;
                Value::Delimited(self.take(length, at)?)
            }
            5 => Value::Fixed32(self.take(4, at)?),
            wire => return Err(format!("field {number} at byte {at} has wire type {wire}, which ONNX does not use")),
        };
        Ok(Field { number, value })
    }

    fn varint(&mut self) -> Result<u64> {
        let at = self.start;
        let mut number = 0u64;
        for shift in (0..70).step_by(7) {
            let Some((&byte, _)) = self.bytes().split_first() else {
                return Err(format!("the number at byte {at} is cut off"));
            };
            self.start += 1;
            // Of the tenth byte only the lowest bit has room.
            if shift == 63 && byte > 1 {
                break;
            }
            number |= u64::from(byte & 127) << shift;
            if byte < 128 {
                return Ok(number);
            }
        }
        Err(format!("the number at byte {at} is longer than 64 bits"))
    }

    fn take(&mut self, length: u64, field: usize) -> Result<Self> {
        let left = self.end - self.start;
        if length > left as u64 {
            return Err(format!("the field at byte {field} has a length of {length}, but only {left} bytes follow"));
        }
        let taken = Self { end: self.start + length as usize, ..*self };
        self.start = taken.end;
        Ok(taken)
    }
}

impl<'a> Field<'a> {
    /// The value of a number field.
    pub fn number_value(self) -> Result<u64> {
        match self.value {
            Value::Varint(number) => Ok(number),
            _ => Err(format!("field {} is not a number", self.number)),
        }
    }

    /// The value of a field of bytes, text or a message.
    pub fn slice(self) -> Result<Slice<'a>> {
        match self.value {
            Value::Delimited(slice) => Ok(slice),
            _ => Err(format!("field {} is a number where bytes were expected", self.number)),
        }
    }

    /// The value of a text field.
    pub fn text(self) -> Result<&'a str> {
        self.slice()?.text()
    }

    /// Calls `each` with the numbers of a field of repeated numbers, packed or not.
    pub fn for_each_number(self, mut each: impl FnMut(u64)) -> Result<()> {
        match self.value {
            Value::Varint(number) => each(number),
            Value::Delimited(packed) => {
                for number in packed.varints() {
                    each(number?);
                }
            }
            _ => return Err(format!("field {} does not hold numbers of varying length", self.number)),
        }
        Ok(())
    }

    /// The bytes of a field of repeated floats (`size` 4) or doubles (8), packed or not.
    pub fn fixed(self, size: usize) -> Result<Slice<'a>> {
        match self.value {
            Value::Fixed32(slice) if size == 4 => Ok(slice),
            Value::Fixed64(slice) if size == 8 => Ok(slice),
            Value::Delimited(slice) if slice.range().len().is_multiple_of(size) => Ok(slice),
            _ => Err(format!("field {} does not hold numbers of {size} bytes", self.number)),
        }
    }
}

/// A message that is being written.
#[derive(Debug, Default)]
pub(super) struct Message(Vec<u8>);

impl Message {
    /// Adds a field that holds a number.
    pub fn number(&mut self, field: u32, value: u64) -> &mut Self {
        self.varint(u64::from(field) << 3);
        self.varint(value);
        self
    }

    /// Adds a field that holds text.
    pub fn text(&mut self, field: u32, text: &str) -> &mut Self {
        self.bytes(field, text.as_bytes())
    }

    /// Adds a field that holds a message, which `fill` writes.
    pub fn message(&mut self, field: u32, fill: impl FnOnce(&mut Message)) -> &mut Self {
        let mut inner = Message::default();
        fill(&mut inner);
        self.bytes(field, &inner.0)
    }

    /// The bytes.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    fn bytes(&mut self, field: u32, bytes: &[u8]) -> &mut Self {
        self.varint(u64::from(field) << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 128 {
            self.0.push(value as u8 | 128);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}
