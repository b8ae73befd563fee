"""How a story is told: words that it chooses once and keeps."""

from lmkit.data.stories.tables import phrase_list, word_list

# Words that stay the same within one story: its voice.
VOICE = {
    "happy": ("happy", "glad", "cheerful", "joyful", "delighted", "pleased"),
    "sad": ("sad", "unhappy", "upset", "gloomy", "miserable", "heartbroken"),
    "scared": ("scared", "afraid", "frightened", "nervous", "worried"),
    "laughed": ("laughed", "giggled", "grinned", "smiled", "beamed", "chuckled"),
    "searched": ("looked", "searched", "hunted", "checked", "peeked"),
    "wow": ("Wow", "Oh my", "Hooray", "Goodness", "Look", "Yippee"),
    "hello": ("Hello", "Hi", "Hello there", "Good day", "Hey"),
    "said": ("said", "called", "whispered", "cried", "announced"),
    "replied": ("replied", "answered", "said", "murmured"),
    "gave": ("gave", "handed", "passed"),
    "liked": ("loved", "liked"),
    "then": ("Then", "After that", "Soon", "A moment later", "Next", "Before long"),
    "suddenly": ("Suddenly", "All at once", "Just then", "At that moment", "Without warning"),
    "finally": ("Finally", "At last", "In the end", "After a long time"),
    "very": ("very", "so", "really", "truly", "quite"),
}
WALKED = word_list("walked ran hurried skipped marched strolled raced wandered rushed tiptoed")

# A proverb begins with a word that fits what happened and goes on with one of each of these.
PROVERB_NOUNS = word_list("""
hands hearts friends words feet eyes minds dreams hopes souls ears steps
""")
PROVERB_ENDS = phrase_list("""
find the way, open every door, never go hungry, mend the world, shine in the dark, carry far, make warm
homes, climb any hill, sleep well at night, outlast the storm, reach the stars, melt the ice, turn no one
away, find their home, bloom in winter, win the day, bring good luck, heal old wounds, move mountains,
wake the sun
""")
