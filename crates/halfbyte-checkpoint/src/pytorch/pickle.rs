//! The machine that a pickle is a program of, without anything that could be called.
//!
//! Protocols 2 to 5: the opcodes that picklers of these write for containers, numbers, texts and tensors. Values lie in an
//! arena, so that no depth matters; what they may take is bounded there, the stack and the memo here.

use super::heap::{Heap, Id, Storage, Value};
use super::names::Name;
use super::{Refusal, shown};

/// The longest stack, and the largest number of memo entries.
const MAX_ENTRIES: usize = 1 << 20;

type Parse<T> = Result<T, String>;

/// What a pickle stands for, and the bytes that it takes.
#[derive(Debug)]
pub(super) struct Pickle<'a> {
    pub heap: Heap<'a>,
    pub root: Id,
    pub bytes: usize,
}

/// Reads the pickle that these bytes begin with. Errors: an opcode or a name that is not one of a pickle of tensors; lengths
/// beyond the bytes; a stack or values that are too large.
pub(super) fn unpickle(bytes: &[u8]) -> Result<Pickle<'_>, Refusal> {
    let mut machine = Machine {
        input: bytes,
        rest: bytes,
        heap: Heap::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
        memoized: 0,
        asks: false,
    };
    match machine.run() {
        Ok(root) => Ok(Pickle { bytes: bytes.len() - machine.rest.len(), heap: machine.heap, root }),
        Err(what) => {
            let what = format!("{what}, at byte {} of the pickle", bytes.len() - machine.rest.len());
            Err(if machine.asks { Refusal::Asks(what) } else { Refusal::Malformed(what) })
        }
    }
}

struct Machine<'a> {
    input: &'a [u8],
    rest: &'a [u8],
    heap: Heap<'a>,
    stack: Vec<Id>,
    /// Heights of the stack where marks lie.
    marks: Vec<usize>,
    memo: Vec<Option<Id>>,
    /// Entries that were made, which the next number of MEMOIZE follows from.
    memoized: usize,
    /// Whether it was refused for a name.
    asks: bool,
}

impl<'a> Machine<'a> {
    fn run(&mut self) -> Parse<Id> {
        loop {
            if let Some(root) = self.step()? {
                return Ok(root);
            }
            if self.stack.len() > MAX_ENTRIES || self.marks.len() > MAX_ENTRIES {
                return Err(format!("its stack has more than {MAX_ENTRIES} entries"));
            }
        }
    }

    /// One opcode; the value if it is the last.
    fn step(&mut self) -> Parse<Option<Id>> {
        let opcode = self.byte()?;
        match opcode {
            // What a pickle is framed by: PROTO, FRAME, STOP.
            0x80 => match self.byte()? {
                2..=5 => {}
                other => return Err(format!("expected pickle protocol 2 to 5, got {other}")),
            },
            0x95 => {
                let length = self.u64()?;
                if length > self.rest.len() as u64 {
                    return Err(format!("a frame of {length} bytes reaches beyond the file"));
                }
            }
            b'.' => return self.pop().map(Some),
            // The stack: MARK, POP, POP_MARK, DUP.
            b'(' => self.marks.push(self.stack.len()),
            b'0' => match self.marks.last() {
                Some(&height) if height == self.stack.len() => {
                    self.marks.pop();
                }
                _ => {
                    self.pop()?;
                }
            },
            b'1' => {
                self.pop_to_mark()?;
            }
            b'2' => {
                let top = self.top()?;
                self.stack.push(top);
            }
            // The memo: BINGET, LONG_BINGET, BINPUT, LONG_BINPUT, MEMOIZE.
            b'h' => {
                let at = self.byte()?.into();
                self.recall(at)?;
            }
            b'j' => {
                let at = self.u32()? as usize;
                self.recall(at)?;
            }
            b'q' => {
                let at = self.byte()?.into();
                self.memoize(at)?;
            }
            b'r' => {
                let at = self.u32()? as usize;
                self.memoize(at)?;
            }
            0x94 => self.memoize(self.memoized)?,
            // Numbers: NONE, NEWTRUE, NEWFALSE, BININT, BININT1, BININT2, LONG1, LONG4, BINFLOAT.
            b'N' => self.stack.push(Heap::NONE),
            0x88 => self.stack.push(Heap::TRUE),
            0x89 => self.stack.push(Heap::FALSE),
            b'J' => {
                let int = self.u32()? as i32;
                self.push_int(int.into())?;
            }
            b'K' => {
                let int = self.byte()?;
                self.push_int(int.into())?;
            }
            b'M' => {
                let int = u16::from_le_bytes(self.array()?);
                self.push_int(int.into())?;
            }
            0x8a => {
                let length = self.byte()?.into();
                self.push_long(length)?;
            }
            0x8b => {
                let length = self.u32()?.into();
                self.push_long(length)?;
            }
            b'G' => {
                self.array::<8>()?;
                self.push(Value::Opaque("a float"))?;
            }
            // Texts: SHORT_BINUNICODE, BINUNICODE, BINUNICODE8; those of Python 2: SHORT_BINSTRING, BINSTRING.
            0x8c | b'U' => {
                let length = self.byte()?.into();
                self.push_text(length, opcode == b'U')?;
            }
            b'X' | b'T' => {
                let length = self.u32()?.into();
                self.push_text(length, opcode == b'T')?;
            }
            0x8d => {
                let length = self.u64()?;
                self.push_text(length, false)?;
            }
            // Bytes: SHORT_BINBYTES, BINBYTES, BINBYTES8.
            b'C' => {
                let length = self.byte()?.into();
                self.push_bytes(length)?;
            }
            b'B' => {
                let length = self.u32()?.into();
                self.push_bytes(length)?;
            }
            0x8e => {
                let length = self.u64()?;
                self.push_bytes(length)?;
            }
            // Tuples: EMPTY_TUPLE, TUPLE, TUPLE1, TUPLE2, TUPLE3.
            b')' => self.stack.push(Heap::EMPTY_TUPLE),
            b't' => {
                let items = self.pop_to_mark()?;
                self.push(Value::Tuple(items))?;
            }
            0x85..=0x87 => {
                let mut items = vec![Heap::NONE; usize::from(opcode - 0x84)];
                for item in items.iter_mut().rev() {
                    *item = self.pop()?;
                }
                self.push(Value::Tuple(items))?;
            }
            // Lists and dicts: EMPTY_LIST, APPEND, APPENDS, EMPTY_DICT, SETITEM, SETITEMS.
            b']' => self.push(Value::List(Vec::new()))?,
            b'a' => {
                let item = self.pop()?;
                self.heap.append(self.top()?, &[item])?;
            }
            b'e' => {
                let items = self.pop_to_mark()?;
                self.heap.append(self.top()?, &items)?;
            }
            b'}' => self.push(Value::Dict(Vec::new()))?,
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.heap.set(self.top()?, &[key, value])?;
            }
            b'u' => {
                let items = self.pop_to_mark()?;
                self.heap.set(self.top()?, &items)?;
            }
            // Names and calls: GLOBAL, STACK_GLOBAL, REDUCE, BUILD, BINPERSID; INST, whose name is told.
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push_name(module, name)?;
            }
            b'i' => {
                let (module, name) = (self.line()?, self.line()?);
                return Err(self.refuse(module, name));
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                match (self.heap.text(module), self.heap.text(name)) {
                    (Some(module), Some(name)) => self.push_name(module, name)?,
                    _ => return Err("names something by values that are no texts".into()),
                }
            }
            b'R' => {
                let (arguments, callee) = (self.pop()?, self.pop()?);
                let made = match *self.heap.get(callee) {
                    Value::Name(name) => name.call(arguments, &mut self.heap)?,
                    ref other => return Err(format!("asks to call {}", other.kind())),
                };
                self.stack.push(made);
            }
            // What a state dict has besides its items: versions of modules.
            b'b' => {
                self.pop()?;
                match self.heap.get(self.top()?) {
                    Value::Dict(_) => {}
                    other => return Err(format!("asks to set the state of {}", other.kind())),
                }
            }
            b'Q' => {
                let id = self.pop()?;
                let storage = self.storage(id)?;
                self.push(Value::Storage(storage))?;
            }
            other => return Err(format!("opcode 0x{other:02x} is none that a pickle of tensors has")),
        }
        Ok(None)
    }

    fn take(&mut self, length: u64) -> Parse<&'a [u8]> {
        match usize::try_from(length).ok().and_then(|length| self.rest.split_at_checked(length)) {
            Some((taken, rest)) => {
                self.rest = rest;
                Ok(taken)
            }
            None => Err(format!("expected {length} more bytes, got {}", self.rest.len())),
        }
    }

    fn array<const N: usize>(&mut self) -> Parse<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64)?);
        Ok(array)
    }

    fn byte(&mut self) -> Parse<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Parse<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Parse<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A text that ends with its line.
    fn line(&mut self) -> Parse<&'a str> {
        let Some(end) = self.rest.iter().position(|&byte| byte == b'\n') else {
            return Err("expected a name that ends with its line".into());
        };
        let line = self.take(end as u64)?;
        self.byte()?;
        str::from_utf8(line).map_err(|_| "expected a name in UTF-8".into())
    }

    fn push(&mut self, value: Value<'a>) -> Parse<()> {
        let id = self.heap.add(value)?;
        self.stack.push(id);
        Ok(())
    }

    fn push_int(&mut self, int: i128) -> Parse<()> {
        match int {
            0 => self.stack.push(Heap::ZERO),
            1 => self.stack.push(Heap::ONE),
            _ => self.push(Value::Int(int))?,
        }
        Ok(())
    }

    /// An integer of so many bytes, with its sign.
    fn push_long(&mut self, length: u64) -> Parse<()> {
        let bytes = self.take(length)?;
        let negative = bytes.last().is_some_and(|&byte| byte >= 0x80);
        let mut wide = if negative { [0xff; 16] } else { [0; 16] };
        match wide.get_mut(..bytes.len()) {
            Some(low) => {
                low.copy_from_slice(bytes);
                self.push_int(i128::from_le_bytes(wide))
            }
            None => self.push(Value::Opaque("a long integer")),
        }
    }

    /// A text. Those of Python 2 may be bytes instead.
    fn push_text(&mut self, length: u64, or_bytes: bool) -> Parse<()> {
        match str::from_utf8(self.take(length)?) {
            Ok(text) => self.push(Value::Text(text)),
            Err(_) if or_bytes => self.push(Value::Opaque("bytes")),
            Err(_) => Err("expected a text in UTF-8".into()),
        }
    }

    fn push_bytes(&mut self, length: u64) -> Parse<()> {
        self.take(length)?;
        self.push(Value::Opaque("bytes"))
    }

    fn push_name(&mut self, module: &str, name: &str) -> Parse<()> {
        match Name::of(module, name) {
            Some(known) => self.push(Value::Name(known)),
            None => Err(self.refuse(module, name)),
        }
    }

    fn refuse(&mut self, module: &str, name: &str) -> String {
        self.asks = true;
        let (module, name) = (shown(module), shown(name));
        format!("asks to call `{module}.{name}`; nothing but tensors and plain containers is read, and nothing was run")
    }

    fn top(&self) -> Parse<Id> {
        match self.stack.last() {
            Some(&top) if self.marks.last().is_none_or(|&height| height < self.stack.len()) => Ok(top),
            _ => Err("takes more from its stack than there is".into()),
        }
    }

    fn pop(&mut self) -> Parse<Id> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    /// What lies above the last mark.
    fn pop_to_mark(&mut self) -> Parse<Vec<Id>> {
        match self.marks.pop() {
            Some(height) => Ok(self.stack.split_off(height)),
            None => Err("takes all up to a mark that is not there".into()),
        }
    }

    fn recall(&mut self, at: usize) -> Parse<()> {
        let known = self.memo.get(at).copied().flatten();
        self.stack.push(known.ok_or_else(|| format!("asks for entry {at} of its memo, which is not there"))?);
        Ok(())
    }

    fn memoize(&mut self, at: usize) -> Parse<()> {
        // No pickle has more entries than bytes.
        if at >= MAX_ENTRIES.min(self.input.len()) {
            return Err(format!("its memo has an entry {at}, beyond the bound"));
        }
        if at >= self.memo.len() {
            self.memo.resize(at + 1, None);
        }
        let top = self.top()?;
        self.memoized += usize::from(self.memo[at].replace(top).is_none());
        Ok(())
    }

    /// The storage of a persistent id: `("storage", class, key, location, elements)`, and None in legacy files.
    fn storage(&self, id: Id) -> Parse<Storage<'a>> {
        let heap = &self.heap;
        let wrong = || "a persistent id is not that of a storage".to_owned();
        let (&[label, class, key, _, elements], view) = match heap.items(id) {
            Some([five @ .., view]) if five.len() == 5 => (five.try_into().map_err(|_| wrong())?, Some(*view)),
            Some(five) => (five.try_into().map_err(|_| wrong())?, None),
            None => return Err(wrong()),
        };
        if view.is_some_and(|view| !matches!(heap.get(view), Value::None)) {
            return Err("a storage is a view of another, which is not read".into());
        }
        let (Some("storage"), &Value::Name(Name::Storage(dtype)), Some(key)) =
            (heap.text(label), heap.get(class), heap.text(key))
        else {
            return Err(wrong());
        };
        match heap.int(elements).map(u64::try_from) {
            Some(Ok(elements)) => Ok(Storage { key, dtype, elements }),
            _ => Err(format!("storage `{}` has a number of elements that is none", shown(key))),
        }
    }
}
